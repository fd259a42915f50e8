"""How do rows pass through the transforms, and how is a bad one taken out?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from penstock.ingest.columns.fixed_shape import fixed_shape, is_whole, missing_values, single_chunk
from penstock.ingest.preprocess.problems import NAMED_ROWS, Origin, Reason, RowProblem, SetAside, unequal_lists
from penstock.messages import counted

__all__ = ["Rows"]


class Rows:
    """Rows between two transforms. An unusable row is taken out at once and listed as a problem.

    Attributes:
        table: the rows left, one chunk a column; `num_rows` and `column` are quicker while columns are put.
        origin: source file and row of each.
        problems: of the rows taken out.
        filtered: transform to number of rows that the user's code has left out there.
        unseen: column to number of values that the train split did not have.
        set_aside: the rows taken out, if they are to be listed.
    """

    def __init__(self, table: pa.Table, origin: Origin, *, listing: bool = False) -> None:
        self._table, self.origin = table, origin
        self._put: dict[str, pa.Array] = {}
        self.problems: list[RowProblem] = []
        self.set_aside: list[SetAside] = []
        self._listing = listing
        self.filtered = Counter[str]()
        self.unseen = Counter[str]()

    def where(self) -> str:
        """Format the place of all rows (at least one) for a message."""
        return f"{self.origin.place(0)} and the {counted(self.num_rows - 1, 'row')} after it"

    @property
    def table(self) -> pa.Table:
        """The rows left. Columns that were put are joined to it at once: a table for each would be quadratic in columns."""
        if self._put:
            fields, columns = list(self._table.schema), list(self._table.columns)
            for name, values in self._put.items():
                index = self._table.schema.get_field_index(name)
                at = slice(len(fields), None) if index < 0 else slice(index, index + 1)
                fields[at], columns[at] = [pa.field(name, values.type)], [values]
            self._table = pa.Table.from_arrays(columns, schema=pa.schema(fields, self._table.schema.metadata))
            self._put = {}
        return self._table

    @table.setter
    def table(self, table: pa.Table) -> None:
        self._table, self._put = table, {}

    @property
    def num_rows(self) -> int:
        """Number of rows left."""
        return int(self._table.num_rows)

    def column(self, name: str) -> pa.Array:
        """Return one column as one array."""
        return single_chunk(self._put[name] if name in self._put else self._table.column(name))

    def put(self, name: str, values: pa.Array) -> None:
        """Replace a column in its position, or append it. Raises ValueError for another number of values than rows."""
        if len(values) != self.num_rows:
            raise ValueError(f"column {name!r} is given {len(values):,} values for {counted(self.num_rows, 'row')}")
        self._put[name] = values

    def reject(self, mask: np.ndarray, reason: Reason, column: str, example: Callable[[int], str] | None = None) -> None:
        """Take out the rows where `mask` is true."""
        if not mask.any():
            return
        rows = np.flatnonzero(mask).tolist()
        place, *others = map(self.origin.place, rows[: 1 + NAMED_ROWS])
        shown = example(rows[0]) if example else ""
        self.problems.append(
            RowProblem(reason=reason, column=column, rows=len(rows), place=place, others=tuple(others), example=shown)
        )
        if self._listing:
            examples = [example(row) if example else "" for row in rows]
            self.set_aside.append(SetAside(reason, column, self.origin.take(mask), examples))
        self._keep(~mask)

    def reject_missing(self, name: str) -> None:
        """Take out the rows without a usable value in column `name`."""
        values = self.column(name)
        if is_whole(values):
            return
        null, not_finite = missing_values(values)
        self.reject(null, "empty" if pa.types.is_null(values.type) else "null", name)
        self.reject(not_finite[~null], "not finite", name)

    def fix_shape(self, name: str, *, is_label: bool = False) -> None:
        """Convert column `name` to numbers of one shape; rows without a usable value are taken out, possibly all.

        Raises:
            DataError: the column holds lists of unequal length, or values that are not numbers.
        """
        self.reject_missing(name)
        if not self.num_rows:
            return
        array = self.column(name)
        column = fixed_shape(name, array, is_label=is_label)
        if not isinstance(column, pa.Array):
            raise unequal_lists(name, column, self.origin)
        if column is array:
            return
        self.put(name, column)
        if isinstance(column.type, pa.FixedShapeTensorType):
            self.reject_missing(name)

    def filter(self, keep: np.ndarray, by: str) -> None:
        """Leave out rows as the user's code of transform `by` asks."""
        self.filtered[by] += int((~keep).sum())
        self._keep(keep)

    def replace(self, table: pa.Table, index: np.ndarray, by: str) -> None:
        """Take other rows, each made from row `index` of these, whose place it keeps; count those of which none is made."""
        self.filtered[by] += self.num_rows - len(np.unique(index))
        self.table, self.origin = table, self.origin.take(index)

    def _keep(self, mask: np.ndarray) -> None:
        self.table = self.table.filter(pa.array(mask)).combine_chunks()
        self.origin = self.origin.take(mask)
