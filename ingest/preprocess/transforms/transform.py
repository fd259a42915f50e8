"""What is a transform? The protocol behind every entry of `preprocess`: penstock's own and those of other packages.

A transform is one class in one file, and one line in `registry` (or an entry point of the group `penstock.transforms`). The
pipeline file's reference, its JSON schema and its error messages follow from the class's `Options` and docstrings.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import pyarrow as pa
from pydantic import AfterValidator, BeforeValidator, Field

from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number, is_text
from penstock.ingest.formats.registry import format_of
from penstock.ingest.preprocess.learnt import ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.spec import DataSpec
from penstock.messages import did_you_mean, in_yaml

__all__ = ["ALL_COLUMNS", "ColumnNames", "Functions", "Names", "Transform"]

ALL_COLUMNS = "*"
"""Instead of a list of columns: every column the transform can take, the label left out."""


def _no_repeats(columns: Any) -> Any:
    if columns != ALL_COLUMNS and len(set(columns)) != len(columns):
        raise ValueError(f"a column is named twice: {columns}")
    return columns


Names = Annotated[list[str], Field(min_length=1), AfterValidator(_no_repeats)]
"""Options: one or more columns by name."""


def _is_listed(names: Any) -> Any:
    """Raise one error, not one for each form of the field."""
    if names != "*" and not isinstance(names, list | tuple):
        raise ValueError(f"columns are a list, such as [{names}], or '*' for all of them")
    return names


ColumnNames = Annotated[
    Literal["*"] | Annotated[list[str], Field(min_length=1)], BeforeValidator(_is_listed), AfterValidator(_no_repeats)
]
"""Options: columns by name, or `*`."""

Functions = Mapping[str, Any]
"""The user's functions, by the target that names them in the pipeline file."""

O = TypeVar("O")  # noqa: E741 - the options


class Transform(Generic[O]):
    """One entry of `preprocess`. The docstring's first paragraph is its line in the reference of the pipeline file.

    Made in the driver and in every worker that prepares rows; must pickle with its options. An exception of another type than
    `penstock.errors` from a package's transform becomes a DataError that names transform, package and rows.

    Attributes:
        name: the name that the pipeline file uses, for messages.
        options: what the file gives it, checked.
    """

    Options: ClassVar[Any]
    """A `penstock.config.Section`, or any type that pydantic can annotate, such as `dict[str, str]`."""

    # Traits: what the rest of penstock has to know. A class, or an object by its options, sets its own.

    learns: bool = False
    """Whether it learns from the train split before it is applied: then `question` and `learn` are called."""
    decodes_images: bool = False
    """Whether it makes rows that hold pixels: then 256 of them are prepared at a time."""
    widens_rows: bool = False
    """Whether it may make rows many times larger: then at most 4096 are prepared at a time."""
    makes_lists: bool = False
    """Whether it makes columns of lists of unequal length (`RaggedType`)."""
    keeps_images_encoded: bool = False
    """Whether it makes columns of images that are decoded in training (`ImageType`)."""
    makes_columns: bool = False
    """Whether it may make a column of any name, so that `data.label` need not be a column of the source."""
    renames: Mapping[str, str] = MappingProxyType({})
    """Old name to new name, of columns that it renames and does not change."""
    drops: Sequence[str] = ()
    """Columns that it leaves out without reading them."""
    keeps_rows: bool = True
    """Whether it makes one row of each that it does not reject, or should: a function of the user's may do otherwise."""
    takes_nulls: bool = False
    """Whether its columns may hold nulls before it, and hold none after it."""
    names_classes: bool = False
    """Whether the categories it learns about the label are the names of the classes."""
    function: str | None = None
    """Target of the user's function or class that it calls, as `file.py:name`: captured with the code that it reaches."""
    num_gpus: float = 0.0
    """GPUs that a process which applies it holds."""

    def __init__(self, name: str, options: O) -> None:
        self.name, self.options = name, options

    @classmethod
    def description(cls) -> str:
        """Return its line for the reference."""
        return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())

    # Names of columns: they show mistakes of a pipeline file before a row is read.

    def named(self, label: str | None) -> Sequence[str]:
        """Return the columns that its options name and that must be there before it; none for `*`."""
        names: Any = getattr(self.options, "columns", ALL_COLUMNS)
        return () if names == ALL_COLUMNS else names

    def names_after(self, names: Sequence[str]) -> list[str] | None:
        """Return the columns after it (or more of them) if those before it are `names`; None if that depends on the rows."""
        return None if self.makes_columns else [name for name in names if name not in self.drops]

    # Which columns it takes. The defaults are for options with `columns`, of numbers.

    def matches(self, kind: pa.DataType) -> bool:
        """Whether `*` means columns of this type."""
        return is_number(kind)

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        """Return what to do about a column of this type that it cannot take, in a few words; None if it can."""
        advice = f"cast it first (cast: {{{in_yaml(column)}: float64}}), or use one_hot or ordinal for categories"
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            advice = f"it takes one number a row: leave {column} out of the transform, or change it in a map_batches function"
        return None if is_number(kind) else advice

    def wanted(self, schema: pa.Schema, label: str | None) -> Sequence[str]:
        """Return the columns it takes, with `*` resolved; `columns` checks whether they are there.

        Raises:
            DataError: `*` matches no column, or it takes the label and there is none.
        """
        names: Any = self.options.columns  # type: ignore[attr-defined]
        if names != ALL_COLUMNS:
            return list(names)
        found = [field.name for field in schema if field.name != label and self.matches(field.type)]
        if not found:
            raise DataError(f"preprocess: {self.name}: `*` matches no column; the rows have {_listed(schema)}")
        return found

    def columns(self, schema: pa.Schema, label: str | None) -> list[str]:
        """Return the columns it takes of rows with `schema`. Runs in the driver for transforms that learn.

        Raises:
            DataError: a column is not there, has a type it cannot take, or `*` matches none.
        """
        wanted = list(self.wanted(schema, label))
        self._refuse_missing(wanted, schema)
        for name in wanted:
            kind = schema.field(name).type
            advice = self.refusal(name, kind)
            if pa.types.is_null(kind):
                advice = f"it has no value in any row: leave it out (drop: [{in_yaml(name)}], or data.columns without it)"
            if advice is not None:
                raise DataError(f"preprocess: {self.name} cannot take column {name!r} of type {kind}", next_step=advice)
        return wanted

    def columns_of(self, schema: pa.Schema, data: DataSpec) -> list[str]:
        """Do as `columns`, where `*` leaves out text that the format calls no feature, such as names of files."""
        hidden = format_of(data).not_features if self.takes_all else ()
        fields = [field for field in schema if field.name not in hidden or not is_text(field.type)]
        return self.columns(pa.schema(fields) if hidden else schema, data.label)

    @property
    def takes_all(self) -> bool:
        """Whether its columns are all that are there (`*`), which the transform before it may change."""
        return bool(getattr(self.options, "columns", None) == ALL_COLUMNS)

    def require(self, rows: Rows, names: Sequence[str]) -> None:
        """Raise DataError if a column is not there."""
        self._refuse_missing(names, rows.table.schema)

    def _refuse_missing(self, names: Sequence[str], schema: pa.Schema) -> None:
        present = set(schema.names)
        missing = next((name for name in names if name not in present), None)
        if missing is not None:
            raise DataError(
                f"preprocess: {self.name}: there is no column {missing!r} at this point; the rows have {_listed(schema)}"
                + did_you_mean(missing, schema.names),
                next_step=f"correct preprocess.{self.name}, or the transforms before it",
            )

    # Learning, if `learns`.

    def question(self, column: str) -> Question:
        """Ask about one of its columns. Runs in the driver."""
        raise NotImplementedError(f"{type(self).__name__} has no `question`")

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        """Keep what it needs of the answer. Runs in the driver. Raises DataError if it cannot use such a column."""
        raise NotImplementedError(f"{type(self).__name__} has no `learn`")

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        """Change `rows` in place: `rows.column` and `rows.put` for columns, `rows.reject` for rows that cannot be used.

        Runs in workers, on up to 65,536 rows at a time, never none; what becomes of a row must not depend on the others.

        Args:
            fitted: what it learnt, in the order of its columns; empty if it learns nothing.

        Raises:
            DataError: it cannot be applied to these columns, whatever the rows hold; or user code failed.
            SpecError: its options do not go with `data`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `apply`")


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
