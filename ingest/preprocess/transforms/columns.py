"""How do columns get another type, another name, or go?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import pyarrow as pa
from pydantic import AfterValidator, Field

from penstock.errors import DataError
from penstock.ingest.columns.casts import first_bad_row
from penstock.ingest.columns.fixed_shape import cast_column
from penstock.ingest.columns.type_text import parse_type, value_text
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import Functions, Transform
from penstock.ingest.spec import DataSpec

__all__ = ["Cast", "Drop", "Rename"]


def _is_type(text: str) -> str:
    parse_type(text)
    return text


class Cast(Transform[dict[str, str]]):
    """Column to Arrow type; a time becomes seconds since 1970 as a number. What does not fit is an error; floats may round.

    Cast to float16 or float32 numbers round, whole ones too, and times by less than a second.
    """

    Options = Annotated[dict[str, Annotated[str, AfterValidator(_is_type)]], Field(min_length=1)]

    def named(self, label: str | None) -> Sequence[str]:
        return list(self.options)

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, list(self.options))
        for name, text in self.options.items():
            values, kind = rows.column(name), parse_type(text)
            try:
                rows.put(name, cast_column(values, kind))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                row = first_bad_row(values, kind, cast_column)
                raise DataError(
                    f"preprocess: cast: {rows.origin.place(row)}: {name} holds {value_text(values, row)}, "
                    f"which does not become {kind} without loss",
                    next_step="cast it to another type, or repair the row",
                ) from error


class Rename(Transform[dict[str, str]]):
    """Old name to new name."""

    Options = Annotated[dict[str, str], Field(min_length=1)]
    makes_columns = True

    def __init__(self, name: str, options: dict[str, str]) -> None:
        super().__init__(name, options)
        self.renames = options

    def named(self, label: str | None) -> Sequence[str]:
        return list(self.options)

    def names_after(self, names: Sequence[str]) -> list[str]:
        # Where the old name is wrong, the transforms after it must not be refused for the new one as well.
        kept = [name for name in names if name not in self.options]
        return [*kept, *self.options.values()]

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, list(self.options))
        renamed = [self.options.get(name, name) for name in rows.table.column_names]
        twice = sorted({name for name in renamed if renamed.count(name) > 1})
        if twice:
            raise DataError(
                f"preprocess: rename gives two columns the name {twice[0]!r}", next_step="drop one, or choose another name"
            )
        rows.table = rows.table.rename_columns(renamed)


class Drop(Transform[list[str]]):
    """Columns to leave out."""

    Options = Annotated[list[str], Field(min_length=1)]

    def __init__(self, name: str, options: list[str]) -> None:
        super().__init__(name, options)
        self.drops = options

    def named(self, label: str | None) -> Sequence[str]:
        return self.options

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, self.options)
        rows.table = rows.table.drop_columns(self.options)
