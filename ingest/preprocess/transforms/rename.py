"""How do columns get other names?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from penstock.errors import DataError
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import Functions, Transform
from penstock.ingest.spec import DataSpec

__all__ = ["Rename"]


class Rename(Transform[dict[str, str]]):
    """Old name to new name."""

    Options = Annotated[dict[str, str], Field(min_length=1)]
    makes_columns = True

    @property
    def renames(self) -> Mapping[str, str]:
        return self.options

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
