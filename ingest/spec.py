"""Which keys describe data in a pipeline file: where rows are, how they are cached and shuffled?"""

from __future__ import annotations

import datetime as dt
import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    FiniteFloat,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from penstock.config import Section
from penstock.errors import SpecError
from penstock.ingest.schema import SPLITS
from penstock.storage import url_problem

__all__ = [
    "PATH",
    "DataSpec",
    "ImagesOptions",
    "LengthSpec",
    "MaterializeSpec",
    "SampleSpec",
    "ShuffleSpec",
    "SplitRule",
    "ValueRange",
    "check_split_rules",
]

PATH = "path"
"""In `by`: the file's path, unless a column has that name."""

Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]


def _refuse_infinity(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is neither a time nor a finite number; leave the limit out")
    return value


Moment = Annotated[dt.datetime | FiniteFloat, BeforeValidator(_refuse_infinity)]
"""A point on a column of times or of numbers."""


class SplitRule(Section):
    """Hold a part of the train files out as another split, by a hash or by time. Added files move no rows of other files.

    The split of a row depends on no other row; with `stratify`, only on rows of the same file and class.
    """

    fraction: Fraction | None = None
    """Share of the rows, 0 to 1. Beside a test split by time, share of the other rows."""
    by: str | Annotated[list[str], Field(min_length=1)] = "row"
    """The hashed value. `row`: the whole row as far as it is read, so that exact duplicates stay together; other `data.columns`
    give another split. A column's name, or a list of names: rows with equal values stay together, such as those of a customer
    or a day; the columns need not be in `data.columns`. `path`, unless a column has that name: the file's path below the
    location, so that the chunks of a document stay together."""
    stratify: str | None = None
    """A column of classes, usually the label. The share is then exact in each class of each file: of n rows, `fraction` times n
    are held out, rounded down or up, those with the lowest hashes; equal rows of a file stay together. A file of one row
    (images) is drawn by its hash, as without `stratify`. The read stage reads the train files once more. Equal rows of two
    files may be in two splits (`data.duplicates`)."""
    after: Moment | None = None
    """Instead of a fraction: rows whose value of the column `by` is this or later. A time such as `2026-01-01` or
    `2026-01-01T12:00:00+01:00` (UTC without a zone), or a number for a column of numbers."""
    before: Moment | None = None
    """Instead of a fraction: rows whose value of the column `by` is earlier than this; with `after`, those in between."""

    @model_validator(mode="after")
    def _holds_out_in_one_way(self) -> SplitRule:
        if self.is_by_time:
            if self.fraction is not None or self.stratify is not None:
                raise ValueError("after and before cannot be used with fraction or stratify")
            if not isinstance(self.by, str) or self.by == "row":
                raise ValueError("after and before need a column of times or numbers: by: COLUMN")
            if self.after is not None and self.before is not None and type(self.after) is not type(self.before):
                raise ValueError("after and before must both be times or both be numbers")
        if self.stratify is not None and self.by != "row":
            raise ValueError("stratify needs by: row: a group may hold several classes")
        return self

    @property
    def is_by_time(self) -> bool:
        """Whether rows are held out by their value of a column, not by a share."""
        return self.after is not None or self.before is not None

    @property
    def needed_columns(self) -> list[str]:
        """Columns of `by` and `stratify`."""
        return [*self.columns, *([] if self.stratify is None else [self.stratify])]

    @property
    def columns(self) -> list[str]:
        """Columns of `by`; none for whole rows."""
        return list(self.by) if isinstance(self.by, list) else [] if self.by == "row" else [self.by]


def _rises(value_range: tuple[float, float]) -> tuple[float, float]:
    if not value_range[0] < value_range[1]:
        raise ValueError(f"a range is [low, high] with low below high, not {list(value_range)}")
    return value_range


ValueRange = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_rises)]


HeldOut = Annotated[
    Annotated[SplitRule, Tag("SplitRule")] | Annotated[str, Tag("str")],
    # By the value's form: a plain union would also report that a rule with a wrong fraction is not a URI.
    Discriminator(lambda value: "SplitRule" if isinstance(value, dict | SplitRule) else "str"),
]


class ImagesOptions(Section):
    """How encoded images become pixels.

    With `format: images` a row is a file: column `image` holds its bytes, `path` its name, and `label` the name of the first
    folder below the root (`cat` for `cat/indoor/1.jpg`; the root of a glob ends at its first wildcard). After the transforms
    `image` is decoded and `path` dropped, unless a transform has changed them. Images of 16 bits or of floats need `range`.
    """

    size: tuple[PositiveInt, PositiveInt] | None = None
    """(height, width) in pixels of decoded images; without it all must have one size."""
    fit: Literal["resize", "crop", "pad"] = "resize"
    """How images get `size`. `resize` changes their proportions. `crop` scales an image until it fills the size and cuts off
    the rest on two sides; `pad` scales it until it fits in and pads with zeros."""
    mode: Literal["RGB", "L"] = "RGB"
    """Colour (3 channels) or grey (1 channel)."""
    range: ValueRange | None = None
    """Values of an image of more than 8 bits (grey or colours of 16, grey of 32, floats) that become 0 and 255: `[0, 65535]`,
    or a window such as `[-1000, 400]`. Values between are scaled and rounded, values beyond become 0 or 255, and a NaN makes
    the image invalid (`data.invalid`). Images of 8 bits are not changed."""


class DataSpec(Section):
    """Where the rows are."""

    # penstock.ingest.formats.section adds the options of the format to the section of a pipeline file.
    format: str
    """Format of every source file."""
    train: str
    """A file, a directory, a glob, or a URL (s3:// or any fsspec scheme). Relative paths start at the pipeline file. A
    directory is read with its subdirectories and links: all files with an extension of the format, or without one. Hidden files
    and files of other tools (`_SUCCESS`, `README`, `*.tmp`) are skipped; other skipped files are counted in a warning."""
    validation: HeldOut | None = None
    """A rule that takes rows from `train`, or a URI of its own."""
    test: HeldOut | None = None
    """A rule that takes rows from `train`, or a URI of its own."""
    datasets: dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")], str] = Field(default_factory=dict)
    """Further datasets that a `train.loop` asks for, by name: files or a URL each, as for `train`, with the same columns.
    `valid` and `val` are other names of `validation`."""
    label: str | None = None
    """The target column."""
    columns: list[str] | None = None
    """Prepare only these columns, not all."""
    types: dict[str, str] = Field(default_factory=dict)
    """Arrow type of a column (`string`, `int64`, `float64`, ...), if inference differs between files."""
    missing_columns: Annotated[Literal["error", "null"] | None, AfterValidator(lambda value: value or "null")] = "error"
    """A column that one file lacks and others have: `error` names both files; `null` reads nulls there with a warning, and
    `imputer` may fill them. In JSON a missing key is always null."""
    invalid: Literal["error", "drop"] = "error"
    """A row with a null, NaN or infinite value, a class that the train split lacks, or an image that cannot be decoded: `error`
    stops the run and names the first five of each kind; `drop` leaves the row out and counts it. An image that is not decoded
    (under `any_type` without `decode_image`) is kept as its bytes, damaged or not. A value that does not fit its column's type
    in `types` or a `cast`, a damaged file that is not an image, a line that is not a record, and an integer label that is not a
    class index always stop the run. Under `drop` transforms do not learn from rows that lack a label or a value that no
    transform fills; from rows found invalid later (a broken image, a result of `map_batches`) they have learnt."""
    duplicates: Literal["warn", "refuse"] = "warn"
    """A row of validation or test that is also in another split, by its content as far as it is read (for images: the picture):
    `warn` counts such rows and names the first; `refuse` stops the run. Rules by whole rows never leave any."""
    any_type: bool = False
    """Keep columns that are not numbers (text, bytes, times, truth values, lists, structs), with their nulls. `train.loop` sets
    it: its function gets them as Ray gives them. All other columns are prepared as for a recipe."""
    images: ImagesOptions = ImagesOptions()
    """Options of `format: images`, and of a Parquet column that holds encoded images."""

    @field_validator("train", "validation", "test")
    @classmethod
    def _is_not_a_misspelt_url(cls, held: str | SplitRule | None) -> str | SplitRule | None:
        if isinstance(held, str) and (problem := url_problem(held)):
            raise ValueError(problem)
        return held

    @model_validator(mode="before")
    @classmethod
    def _valid_is_validation(cls, given: Any) -> Any:
        """Take `datasets.valid`, `val`, `validation` and `test` for the splits that they are."""
        datasets = given.get("datasets") if isinstance(given, dict) else None
        if not isinstance(datasets, dict):
            return given
        for name, split in (("valid", "validation"), ("val", "validation"), ("validation", "validation"), ("test", "test")):
            if name in datasets:
                if given.get(split) is not None:
                    raise ValueError(f"datasets.{name} is another name of {split}, which is given, too; take one out")
                given = {**given, split: datasets[name], "datasets": {k: v for k, v in given["datasets"].items() if k != name}}
        return given

    @field_validator("datasets")
    @classmethod
    def _are_further(cls, datasets: dict[str, str]) -> dict[str, str]:
        if "train" in datasets:
            raise ValueError("train is data.train, not a further dataset")
        return datasets

    @model_validator(mode="after")
    def _has_a_size_for_each_split(self) -> DataSpec:
        for split, rule in split_rules(self).items():
            if rule.fraction is None and not rule.is_by_time:
                raise ValueError(f"{split} needs a fraction, or after or before")
        return self

    @property
    def locations(self) -> tuple[str, ...]:
        """Splits and further datasets, in the order of their rows."""
        return (*SPLITS, *self.datasets)

    def place(self, location: str) -> str | SplitRule | None:
        """Return where the rows of a split or of a further dataset are."""
        return self.datasets[location] if location in self.datasets else getattr(self, location)

    @property
    def may_share_rows(self) -> bool:
        """Whether equal rows can be in two splits: rules by whole rows keep them together."""
        held_out = (self.validation, self.test)
        return any(
            isinstance(rule, str) or (rule is not None and (rule.by != "row" or rule.stratify is not None)) for rule in held_out
        )

    @property
    def read_columns(self) -> list[str] | None:
        """`columns` and the columns of rules; None for all."""
        if self.columns is None:
            return None
        by = (name for rule in split_rules(self).values() for name in rule.needed_columns)
        return list(dict.fromkeys([*self.columns, *by]))


class MaterializeSpec(Section):
    """How prepared rows are cached for training."""

    cache: Literal["disk", "memory", "none"] = "disk"
    """`disk`: Arrow shards in the storage; `memory`: Ray's object store; `none`: prepared again every epoch, which needs
    `shuffle.mode: windowed` or `none`."""
    unit_bytes: PositiveInt = 8 << 20
    """Smaller source files are grouped into one commit unit of about this many bytes."""
    shard_bytes: PositiveInt = 64 << 20
    """Size of a shard, which is fetched, checked and evicted as a whole."""
    overlap: bool | Literal["auto"] = False
    """`true`: training begins once the first unit is prepared, and reads the others as they are committed, in the order of
    their first use. Rows, steps and weights are those of `false`, and a resume is as exact. It needs row counts that are known
    beforehand: splits with files of their own, `data.invalid: error`, no `filter` or `flat_map`, and classes of a
    `label_encoder` or a label that is not whole numbers; and `shuffle.mode: windowed` or `none`, whose first steps have rows of
    some shards only. A unit with another number of rows ends the run. `auto`: `true` where none of this is in doubt, which a
    function of the user's, or a label without a `label_encoder`, is."""


class SampleSpec(Section):
    """Draw rows by a column, instead of each row once an epoch. Name one of the three columns."""

    balance: str | None = None
    """Column of classes, usually the label: each class is drawn equally often, whatever its rows."""
    power: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Strength of `balance`: 1 makes all classes equal; less makes a class's share proportional to its rows to the power of 1
    minus this, so 0.5 takes the square root. (A sampling temperature T is a power of 1 - 1/T.)"""
    weights: str | None = None
    """Column of weights, 0 or more: a row is drawn in proportion to its weight. Each training process keeps 40 bytes for each
    row of the split, and 32 more during the start; `balance` and `easiest_first` keep 8, and 18 more."""
    easiest_first: str | None = None
    """Column to order by: training begins with the rows of the smallest values, and adds more rows with every epoch."""
    start: Fraction = 0.25
    """Share of the rows that epoch 0 of `easiest_first` draws from."""
    over_epochs: PositiveInt = 5
    """First epoch in which `easiest_first` draws from all rows; until then the share grows evenly."""
    rows: PositiveInt | None = None
    """Rows of an epoch, instead of the rows of the split."""

    @model_validator(mode="after")
    def _names_one_column(self) -> SampleSpec:
        named = [name for name in (self.balance, self.weights, self.easiest_first) if name is not None]
        if len(named) != 1:
            raise ValueError("name one of balance, weights and easiest_first")
        for column, options in (("balance", ("power",)), ("easiest_first", ("start", "over_epochs"))):
            for option in options:
                if getattr(self, column) is None and getattr(self, option) != type(self).model_fields[option].default:
                    raise ValueError(f"{option} needs {column}")
        return self

    @property
    def column(self) -> str:
        """The named column."""
        return self.balance or self.weights or self.easiest_first or ""


class LengthSpec(Section):
    """Make steps of rows of like length, for a column of lists of unequal length. A resume is exact, as with any order."""

    column: str
    """A column that the transform `ragged` makes."""
    pool_batches: PositiveInt = 64
    """Steps whose rows form a pool. For padded batches a pool is sorted by length and cut into steps, which come in random
    order. A larger pool pads less and mixes less. With `materialize.cache: none` each worker holds the rows of two pools."""
    batch_entries: PositiveInt | None = None
    """Most entries of a step over all workers, with padding, and at most `train.batch_rows` rows; a longer row is a step alone.
    Without it every step has `train.batch_rows` rows."""


class ShuffleSpec(Section):
    """The order in which training sees the rows."""

    mode: Literal["none", "windowed", "global"] = "global"
    """`global`: one permutation of all rows; `windowed`: shuffled groups, then rows inside a window; `none`: as stored."""
    seed: int = 0
    """Seed of the order, of weight initialisation and of augmentation."""
    window_rows: Annotated[int, Field(ge=2)] = 1 << 18
    """Rows in one window of `windowed`, over all lanes. With `window_of: rows` it consists of 32 runs of neighbours, or some in
    each lane: a larger one reads longer runs, a smaller one mixes better. With `shards` a larger one mixes better and needs
    more of the node's disk. Once rows are on disk, `penstock plan` prints how they mix."""
    window_of: Literal["rows", "shards"] = "rows"
    """Parts of a window of `windowed`. `rows`: short runs of rows from the whole split, which mixes best. `shards`: whole
    shards, at least one in each lane, with about `window_rows` rows, so that a node reads the shards of one window at a time
    and each once an epoch: for data larger than the node's cache. Needs `materialize.cache: disk`."""
    lanes: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = "auto"
    """Parts that the shards are dealt to. Every step has rows of all, and each worker reads some of them, so that a machine
    fetches only its part of the data. Step by step the rows are the same for any number of workers. `1` lets every worker read
    from all shards. `auto` takes the largest power of two that divides `train.batch_rows`, up to 64 (256 with
    `window_of: shards`) and up to the number of shards, and 1 beside `sample`, `by_length` or `mode: none`. Of a stream
    (`materialize.cache: none`) the units are dealt: files, or pieces of large ones. A worker prepares those of its lanes, and
    `auto` takes as many lanes as units fit into one window, or into 1 GiB."""
    sample: SampleSpec | None = None
    """Draw rows by a column. Needs `mode: global`."""
    by_length: LengthSpec | None = None
    """Put rows of like length, or with a given number of entries, into a step. Needs the transform `ragged`."""

    @model_validator(mode="after")
    def _samples_from_all_rows(self) -> ShuffleSpec:
        if self.sample is not None and self.mode != "global":
            raise ValueError(f"sample draws from all rows, so it needs mode: global, not {self.mode}")
        if self.lanes not in ("auto", 1) and (reason := self._one_lane_because):
            raise ValueError(f"lanes: {self.lanes} gives each worker its own shards, and {reason}; leave lanes out")
        return self

    def most_lanes(self, batch_rows: int) -> int:
        """Return the number of lanes, which with `auto` is at most so many."""
        if self._one_lane_because or self.lanes != "auto":
            return 1 if self.lanes == "auto" else self.lanes
        return min(256 if self.window_of == "shards" else 64, batch_rows & -batch_rows)

    @property
    def _one_lane_because(self) -> str:
        if self.sample is not None:
            return "sample draws from all rows"
        if self.by_length is not None:
            return "by_length puts rows of all shards into a step"
        return "mode: none reads them as stored" if self.mode == "none" else ""


def check_split_rules(data: DataSpec) -> None:
    """Check rules that hold out rows of the train files together.

    Raises:
        SpecError: the fractions add up to 1 or more, or the rules stratify in two ways.
    """
    rules = split_rules(data)
    if len(rules) == 2 and any(rule.stratify for rule in rules.values()):
        test, validation = rules["test"], rules["validation"]
        if not test.is_by_time and (test.by, test.stratify) != (validation.by, validation.stratify):
            raise SpecError(
                "data.validation and data.test must have the same `by` and `stratify` if one of them has stratify",
                next_step="give both the same, or take test rows by time or from other files",
            )
    fractions = {split: rule.fraction for split, rule in rules.items() if rule.fraction is not None}
    if sum(fractions.values()) >= 1.0:
        named = " and ".join(f"data.{split}.fraction: {fraction}" for split, fraction in fractions.items())
        raise SpecError(f"{named} add up to 1 or more: no rows are left to train on", next_step="lower them")


def split_rules(data: DataSpec) -> dict[str, SplitRule]:
    """Return the rules that take rows from the train files, by split."""
    found = {"test": data.test, "validation": data.validation}
    return {split: rule for split, rule in found.items() if isinstance(rule, SplitRule)}
