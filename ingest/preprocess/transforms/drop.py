"""How are columns left out?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import Functions, Transform
from penstock.ingest.spec import DataSpec

__all__ = ["Drop"]


class Drop(Transform[list[str]]):
    """Columns to leave out."""

    Options = Annotated[list[str], Field(min_length=1)]

    @property
    def drops(self) -> Sequence[str]:
        return self.options

    def named(self, label: str | None) -> Sequence[str]:
        return self.options

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, self.options)
        rows.table = rows.table.drop_columns(self.options)
