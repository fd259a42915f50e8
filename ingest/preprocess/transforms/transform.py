"""What is a transform? The protocol behind every entry of `preprocess`: penstock's own and those of other packages.

A transform is one class in one file, and one line in `registry` (or an entry point of the group `penstock.transforms`). The
pipeline file's reference, its JSON schema and its error messages follow from the class's `Options` and docstrings.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import pyarrow as pa
from pydantic import AfterValidator, BeforeValidator, Field

from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number
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
    """One sentence instead of one for each form it might have had."""
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

    def __init__(self, name: str, options: O) -> None:
        self.name, self.options = name, options

    @classmethod
    def description(cls) -> str:
        """One line for the reference."""
        return " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())

    # Traits: what the rest of penstock has to know. A class overrides one by a plain attribute, `decodes_images = True`.

    @property
    def learns(self) -> bool:
        """Whether it learns from the train split before it is applied: then `question` and `learn` are called."""
        return False

    @property
    def decodes_images(self) -> bool:
        """Whether rows come out that hold pixels: then 256 of them are prepared at a time."""
        return False

    @property
    def widens_rows(self) -> bool:
        """Whether rows come out that may be many times larger than they went in: then at most 4096 are prepared at a time."""
        return False

    @property
    def makes_lists(self) -> bool:
        """Whether it makes columns of lists of unequal length (`RaggedType`)."""
        return False

    @property
    def keeps_images_encoded(self) -> bool:
        """Whether it makes columns of images that are decoded in training (`ImageType`)."""
        return False

    @property
    def makes_columns(self) -> bool:
        """Whether it may make a column of any name, so that `data.label` need not be a column of the source."""
        return False

    @property
    def renames(self) -> Mapping[str, str]:
        """Old name to new name, of columns that it passes on as they are under another name."""
        return {}

    @property
    def drops(self) -> Sequence[str]:
        """Columns that it leaves out without looking at them."""
        return ()

    @property
    def takes_nulls(self) -> bool:
        """Whether its columns may hold nulls, and hold none after it."""
        return False

    @property
    def names_classes(self) -> bool:
        """Whether the categories it learns about the label are the names of the classes."""
        return False

    @property
    def libraries(self) -> Sequence[str]:
        """Distributions beside penstock's smallest set that applying it needs: a registered model requires them."""
        return ()

    @property
    def function(self) -> str | None:
        """Target of the user's function that it calls, as `file.py:name`: captured with the code that it reaches."""
        return None

    # What the names of columns alone tell of a pipeline file's mistakes, before a row is read.

    def named(self, label: str | None) -> Sequence[str]:
        """Columns that its options name and that must be there before it; none for `*`."""
        names: Any = getattr(self.options, "columns", ALL_COLUMNS)
        return () if names == ALL_COLUMNS else names

    def names_after(self, names: Sequence[str]) -> list[str] | None:
        """Names of the columns after it, or more of them, where those before it are `names`; None if only the rows tell."""
        return None if self.makes_columns else [name for name in names if name not in self.drops]

    # What it asks of the data. These defaults are for options with `columns`, of numbers.

    def matches(self, kind: pa.DataType) -> bool:
        """Whether `*` means columns of this type."""
        return is_number(kind)

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        """Why not a column of this type: what to do about it, in a few words; None if it can be taken."""
        advice = f"cast it first (cast: {{{in_yaml(column)}: float64}}), or use one_hot or ordinal for categories"
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            advice = f"it takes one number a row: leave {column} out of the transform, or change it in a map_batches function"
        return None if is_number(kind) else advice

    def wanted(self, schema: pa.Schema, label: str | None) -> Sequence[str]:
        """Names of the columns it takes, `*` resolved; whether they are there is checked by `columns`.

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
        """Name the columns it takes, where the rows have `schema` before it. Runs in the driver for transforms that learn.

        Raises:
            DataError: a column is not there, has a type it cannot take, or `*` matches none.
        """
        wanted = list(self.wanted(schema, label))
        present = set(schema.names)
        for name in wanted:
            if name not in present:
                raise self._no_column(name, schema.names, _listed(schema))
        for name in wanted:
            kind = schema.field(name).type
            advice = self.refusal(name, kind)
            if advice is not None:
                raise DataError(f"preprocess: {self.name} cannot take column {name!r} of type {kind}", next_step=advice)
        return wanted

    @property
    def takes_all(self) -> bool:
        """Whether its columns are those that happen to be there (`*`), which the transform before it may change."""
        return bool(getattr(self.options, "columns", None) == ALL_COLUMNS)

    def require(self, rows: Rows, names: Sequence[str]) -> None:
        """Raise DataError if a column is not there."""
        present = rows.table.column_names
        for name in names:
            if name not in present:
                raise self._no_column(name, present, ", ".join(present))

    def _no_column(self, name: str, names: Sequence[str], listed: str) -> DataError:
        return DataError(
            f"preprocess: {self.name}: there is no column {name!r} at this point; the rows have {listed}"
            + did_you_mean(name, names),
            next_step=f"correct preprocess.{self.name}, or the transforms before it",
        )

    # What it learns, if `learns`.

    def question(self, column: str) -> Question:
        """What it wants to know about one of its columns. Runs in the driver."""
        raise NotImplementedError(f"{type(self).__name__} learns, and has no question")

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        """What it keeps of the answer. Runs in the driver. Raises DataError if it cannot use such a column."""
        raise NotImplementedError(f"{type(self).__name__} learns, and keeps nothing")

    # How it is applied.

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
