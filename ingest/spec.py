"""What may a pipeline file say about data: where rows are, how they are prepared, cached and shuffled?"""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from penstock.config import Section
from penstock.errors import SpecError
from penstock.storage import url_problem

__all__ = [
    "PATH",
    "DataSpec",
    "ImagesOptions",
    "LengthSpec",
    "MaterializeSpec",
    "QuarantineSpec",
    "SampleSpec",
    "ShuffleSpec",
    "SplitRule",
    "ValueRange",
    "check_split_rules",
]


PATH = "path"
"""In `by`: the file's path, where no column has that name."""

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]


Moment = dt.datetime | FiniteFloat
"""A point on a column of times or of numbers."""


class SplitRule(Section):
    """Take a part of the train files as a held-out split, by a hash or by time. No added file moves a row of another.

    No row influences where another one goes; with `stratify` only rows of the same file and class do.
    """

    fraction: Fraction | None = None
    """Share of the rows, 0 to 1. Beside a test split by time, of the rows that are not in it."""
    by: str | Annotated[list[str], Field(min_length=1)] = "row"
    """What is hashed. `row`: the whole row as far as it is read, so exact duplicates stay together; other `data.columns` deal
    the rows anew. A column's name, or several in a list: rows that are equal there stay together, as those of a customer or a
    day; such columns need not be in `data.columns`. `path`, where no column has that name: the file's path below the location,
    so the chunks of a document stay together."""
    pattern: str | None = None
    """A regular expression for what to hash of the one column, or of `path`: its first group, or all that it matches. With `by:
    path` and `pattern: "patient-[0-9]+"`, all files of a patient stay together. A row where it is not found is an error."""

    stratify: str | None = None
    """A column of classes, usually the label. Of each file and each class in it, the share is then exact: of n rows, `fraction`
    times n are held out, rounded down or up, those whose hash is lowest; and equal rows of a file stay together. Where a file
    is one row (images) it is a draw by the hash, as without. The read stage reads the train files once more for it. Equal rows
    of two files may come to lie in two splits (`data.duplicates`)."""
    after: Moment | None = None
    """Instead of a fraction: rows whose value of the column `by` is this or later. A time such as `2026-01-01` or
    `2026-01-01T12:00:00+01:00` (UTC where no zone is said), or a number for a column of numbers."""
    before: Moment | None = None
    """Instead of a fraction: rows whose value of the column `by` is earlier than this; with `after`, those in between."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _has_one_column_for_a_pattern(self) -> SplitRule:
        if self.pattern is not None and len(self.columns) != 1:
            raise ValueError("pattern goes with one column, or with by: path")
        return self

    @model_validator(mode="after")
    def _holds_out_in_one_way(self) -> SplitRule:
        if self.is_by_time:
            if self.fraction is not None or self.pattern is not None or self.stratify is not None:
                raise ValueError("after and before go with `by` alone")
            if not isinstance(self.by, str) or self.by == "row":
                raise ValueError("after and before need a column of times or numbers: by: COLUMN")
            if self.after is not None and self.before is not None and type(self.after) is not type(self.before):
                raise ValueError("after and before are of two kinds")
        if self.stratify is not None and self.by != "row":
            raise ValueError("stratify goes with by: row: a group may hold several classes")
        return self

    @property
    def is_by_time(self) -> bool:
        """Whether rows are held out by where they lie on a column, not by a share."""
        return self.after is not None or self.before is not None

    @property
    def looks_at(self) -> list[str]:
        """All columns it needs, besides those of whole rows."""
        return [*self.columns, *([] if self.stratify is None else [self.stratify])]

    @property
    def columns(self) -> list[str]:
        """The columns it goes by; none for whole rows."""
        return list(self.by) if isinstance(self.by, list) else [] if self.by == "row" else [self.by]


def _rises(value_range: tuple[float, float]) -> tuple[float, float]:
    if not value_range[0] < value_range[1]:
        raise ValueError(f"a range is [low, high] with low below high, not {list(value_range)}")
    return value_range


ValueRange = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_rises)]


def _held_out_kind(value: object) -> str:
    return "SplitRule" if isinstance(value, dict | SplitRule) else "str"


HeldOut = Annotated[
    Annotated[SplitRule, Tag("SplitRule")] | Annotated[str, Tag("str")],
    # By the value's form: a plain union would also report that a rule with a wrong fraction is no URI.
    Discriminator(_held_out_kind),
]


class ImagesOptions(Section):
    """How encoded images become pixels.

    With `format: images` a row is a file: column `image` holds its bytes, `path` its name, and `label` the name of the first
    folder below the root (`cat` for `cat/indoor/1.jpg`; the root of a glob ends at its first wildcard). After the transforms
    `image` is decoded and `path` left out, unless one has changed them. Images of 16 bits or of floats are refused without
    `range`.
    """

    size: tuple[PositiveInt, PositiveInt] | None = None
    """(height, width) in pixels that images come to when they are decoded; without it all must have one size."""
    fit: Literal["resize", "crop", "pad"] = "resize"
    """How they come to `size`. `resize` gives up their proportions. `crop` and `pad` keep them: the image is scaled until it
    fills the size, and what is too much on two sides is cut off; or until it fits in, and what lacks is padded with zeros."""
    mode: Literal["RGB", "L"] = "RGB"
    """Colour (3 channels) or grey (1 channel)."""
    range: ValueRange | None = None
    """Which values of an image of more than 8 bits (grey or colours of 16, grey of 32, floats) become 0 and 255: `[0, 65535]`,
    or a window such as `[-1000, 400]`. What lies between is scaled and rounded, what lies beyond becomes 0 or 255, and a NaN
    makes an image a broken one (`data.invalid`). Images of 8 bits stay as they are."""


class QuarantineSpec(Section):
    """How many rows `invalid: quarantine` may set aside. Above either limit the run stops, and names the first rows."""

    max_rows: NonNegativeInt | None = None
    """At most so many rows."""
    max_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01
    """At most this share of all rows that are read, 0 to 1."""

    def limit(self, rows: int) -> int:
        """The most rows that may be set aside of `rows`."""
        return min(int(self.max_fraction * rows), rows if self.max_rows is None else self.max_rows)


class DataSpec(Section):
    """Where the rows are."""

    # A pipeline file's section is checked, and has the options of its format besides: penstock.ingest.formats.section.
    format: str
    """Format of every source file."""
    train: str
    """A file, a directory, a glob, or a URL of one (s3:// or any fsspec scheme). Relative paths start at the pipeline file. A
    directory is read with those below it, links included. Of it those files are read whose extension is one of the format, or
    that have none; hidden ones, and files of other tools (`_SUCCESS`, `README`, `*.tmp`), are left out, and any other file
    that is left out is counted in a warning."""
    validation: HeldOut | None = None
    """A rule that takes rows from `train`, or a URI of its own."""
    folds: Annotated[int, Field(ge=2, le=1000)] | None = None
    """Cross-validation: the rows of `train` that are not test rows are dealt into so many folds, and one of them is validation.
    `penstock run FILE --folds` trains once for each. `validation` then says only how they are dealt: `by`, `pattern` or
    `stratify`."""
    fold: NonNegativeInt = 0
    """Which fold is validation, from 0."""
    test: HeldOut | None = None
    """A rule that takes rows from `train`, or a URI of its own."""
    label: str | None = None
    """The target column."""
    columns: list[str] | None = None
    """Prepare only these columns, not all."""
    types: dict[str, str] = Field(default_factory=dict)
    """Arrow type a column is read as (`string`, `int64`, `float64`, ...), where inference disagrees between files."""
    missing_columns: Annotated[Literal["error", "null"] | None, AfterValidator(lambda said: said or "null")] = "error"
    """What a column is in a file that lacks it while others have it. `error` names both; `null` reads nulls there, and
    says so; `imputer` or `null_mask` may fill them. In JSON a missing key is always null."""
    invalid: Literal["error", "drop", "quarantine"] = "error"
    """What happens to a row with a null, NaN or infinite value, a class that the train split lacks, or an image that cannot be
    decoded. `error` stops the run; `drop` leaves the row out and counts it. `quarantine` leaves it out too, also where a value
    does not read as its column's type in `types` or in a `cast`, or an integer label is no class index: each such row is in a
    Parquet table in the storage, with file, row, column and reason, and there may be as many as `data.quarantine` says. A
    damaged file that is no image, and a line that is no record at all, stop the run. Under `error` and `drop` so does an
    integer label below 0, and in all cases one that is larger than those of the train split. Transforms do not learn from
    rows that cannot be read, or that lack a label or a value that no transform fills; from a row that is found bad later (a
    broken image, a result of `map_batches`) they have learnt its other values."""
    quarantine: QuarantineSpec = QuarantineSpec()
    """The budget of `invalid: quarantine`."""
    duplicates: Literal["warn", "refuse"] = "warn"
    """What happens where a row of validation or test is in another split too, by its content as far as it is read (of images:
    the picture). `warn` counts such rows and names the first; `refuse` stops the run. Rules by whole rows never leave any."""
    images: ImagesOptions = ImagesOptions()
    """Options of `format: images`, and of a Parquet column that holds encoded images."""

    @field_validator("train", "validation", "test")
    @classmethod
    def _is_no_misspelt_url(cls, held: str | SplitRule | None) -> str | SplitRule | None:
        if isinstance(held, str) and (problem := url_problem(held)):
            raise ValueError(problem)
        return held

    @model_validator(mode="before")
    @classmethod
    def _deals_folds_by_rows(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("folds") is not None and given.get("validation") is None:
            return {**given, "validation": {}}
        return given

    @model_validator(mode="after")
    def _says_how_much_is_held_out(self) -> DataSpec:
        dealt = self.validation if self.folds is not None else None
        if self.folds is not None and (not isinstance(dealt, SplitRule) or dealt.fraction is not None or dealt.is_by_time):
            raise ValueError(
                "with folds, validation says only how they are dealt: leave it out, or give by, pattern or stratify"
            )
        for split, rule in split_rules(self).items():
            if rule is not dealt and rule.fraction is None and not rule.is_by_time:
                raise ValueError(f"{split} needs a fraction, or after or before")
        if self.fold >= (self.folds or 1):
            raise ValueError(f"fold {self.fold} of {self.folds or 'no'} folds; they are counted from 0")
        return self

    @model_validator(mode="after")
    def _has_a_quarantine_for_its_budget(self) -> DataSpec:
        if self.quarantine != QuarantineSpec() and self.invalid != "quarantine":
            raise ValueError("quarantine is the budget of invalid: quarantine")
        return self

    @property
    def may_share_rows(self) -> bool:
        """Whether equal rows can come to lie in two splits: rules that go by whole rows keep them together."""
        held_out = (self.validation, self.test)
        return any(
            isinstance(rule, str) or (rule is not None and (rule.by != "row" or rule.stratify is not None)) for rule in held_out
        )

    @property
    def read_columns(self) -> list[str] | None:
        """`columns`, and those that rules go by besides; None if all are read."""
        if self.columns is None:
            return None
        by = (name for rule in split_rules(self).values() for name in rule.looks_at)
        return list(dict.fromkeys([*self.columns, *by]))


class MaterializeSpec(Section):
    """How prepared rows are kept between preparation and training."""

    cache: Literal["disk", "memory", "none"] = "disk"
    """`disk`: Arrow shards in the storage; `memory`: Ray's object store; `none`: prepared again every epoch, which needs
    `shuffle.mode: windowed` or `none`."""
    unit_bytes: PositiveInt = 8 << 20
    """Source files smaller than this are grouped into one commit unit of about this many bytes."""
    shard_bytes: PositiveInt = 64 << 20
    """A shard is closed at about this many bytes of rows: what is fetched, checked and evicted at once."""


class SampleSpec(Section):
    """Rows drawn in other shares than they are stored in, instead of each once an epoch. Name one of the three columns."""

    balance: str | None = None
    """Column of classes, usually the label: each class is drawn as often as any other, however many rows it has."""
    power: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """How far `balance` goes: 1 makes all classes equal; less keeps a class's share in proportion to its rows to the power of
    1 minus this, so 0.5 takes the square root. (A sampling temperature T is a power of 1 - 1/T.)"""
    weights: str | None = None
    """Column of weights, 0 or more: a row is drawn in proportion to its own. Each training process keeps 40 bytes for each row
    of the split, and 32 more while it lays them out; `balance` and `easiest_first` keep 8, and 18 more."""
    easiest_first: str | None = None
    """Column to order by: training begins with the rows of the smallest values, and takes in more with every epoch."""
    start: Fraction = 0.25
    """Share of the rows that epoch 0 of `easiest_first` draws from."""
    over_epochs: PositiveInt = 5
    """From which epoch on `easiest_first` draws from all rows; in between the share grows evenly."""
    rows: PositiveInt | None = None
    """Rows of an epoch, instead of as many as the split has."""

    @model_validator(mode="after")
    def _names_one_column(self) -> SampleSpec:
        named = [name for name in (self.balance, self.weights, self.easiest_first) if name is not None]
        if len(named) != 1:
            raise ValueError("name one of balance, weights and easiest_first")
        for column, options in (("balance", ("power",)), ("easiest_first", ("start", "over_epochs"))):
            for option in options:
                if getattr(self, column) is None and getattr(self, option) != type(self).model_fields[option].default:
                    raise ValueError(f"{option} goes with {column}")
        return self

    @property
    def column(self) -> str:
        """The column it goes by."""
        return self.balance or self.weights or self.easiest_first or ""


class LengthSpec(Section):
    """Which rows make a step where a column holds lists of unequal length. Exact to continue, as any other order."""

    column: str
    """A column that the transform `ragged` has made."""
    pool_batches: PositiveInt = 64
    """Rows of so many steps are looked at together. Where batches are padded they are sorted by length, so that rows of like
    length meet; the steps then come in random order. More pads less, and mixes less. With `materialize.cache: none` each worker
    holds the rows of two such pools."""
    batch_entries: PositiveInt | None = None
    """A step takes rows up to so many entries over all workers, padding included, and at most `train.batch_rows` rows; a row
    that has more is a step of its own. Without it every step has `train.batch_rows` rows."""


class ShuffleSpec(Section):
    """The order in which training sees the rows."""

    mode: Literal["none", "windowed", "global"] = "global"
    """`global`: one permutation of all rows; `windowed`: shuffled groups, then rows inside a window; `none`: as stored."""
    seed: int = 0
    """Seed of the order, of weight initialisation and of augmentation."""
    window_rows: Annotated[int, Field(ge=2)] = 1 << 18
    """Rows in one window of `windowed`. Of `rows` it is put together from 32 runs of neighbours: a larger one reads longer
    runs, a smaller one mixes better. Of `shards`, a larger one holds more of them: it mixes better, and takes more of the
    node's disk. `penstock plan` says what a window costs in mixing."""
    window_of: Literal["rows", "shards"] = "rows"
    """What a window of `windowed` is made of. `rows`: short runs of rows from all over the split, which mixes best. `shards`:
    whole shards, at least one and about `window_rows` rows of them, so that a node reads one window's shards at a time and
    each of them once an epoch: for data larger than the node's cache. Needs `materialize.cache: disk`."""
    sample: SampleSpec | None = None
    """Draw rows in other shares than they are stored in. Needs `mode: global`."""
    by_length: LengthSpec | None = None
    """Put rows of like length, or of so many entries together, into a step. Needs the transform `ragged`."""

    @model_validator(mode="after")
    def _samples_from_all_rows(self) -> ShuffleSpec:
        if self.sample is not None and self.mode != "global":
            raise ValueError(f"sample draws from all rows, so it needs mode: global, not {self.mode}")
        return self


def check_split_rules(data: DataSpec) -> None:
    """Refuse rules that leave nothing to train on.

    Raises:
        SpecError: the fractions add up to 1 or more, or strata are dealt in two ways.
    """
    rules = split_rules(data)
    if len(rules) == 2 and any(rule.stratify for rule in rules.values()):
        test, validation = rules["test"], rules["validation"]
        if not test.is_by_time and (test.by, test.stratify) != (validation.by, validation.stratify):
            raise SpecError(
                "data.validation and data.test must go by the same `by` and `stratify`, where one of them has stratify",
                next_step="give both the same, or take test rows by time or from files of their own",
            )
    fractions = {split: rule.fraction for split, rule in rules.items() if rule.fraction is not None}
    if sum(fractions.values()) >= 1.0:
        said = " and ".join(f"data.{split}.fraction: {fraction}" for split, fraction in fractions.items())
        raise SpecError(f"{said} add up to 1 or more: no rows are left to train on", next_step="lower them")


def split_rules(data: DataSpec) -> dict[str, SplitRule]:
    """The rules that take rows from the train files, by split."""
    found = {"test": data.test, "validation": data.validation}
    return {split: rule for split, rule in found.items() if isinstance(rule, SplitRule)}
