"""How do the fields of structs become columns of their own?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.images import holds_images
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Transform
from penstock.ingest.spec import DataSpec

__all__ = ["Flatten", "FlattenOptions"]


class FlattenOptions(Section):
    """Structs whose fields become columns, those of structs inside too; the structs themselves go."""

    columns: ColumnNames
    """Names, or `*` for every struct but encoded images."""
    separator: str = "."
    """Joins the names: field `age` of `customer` becomes `customer.age`."""


class Flatten(Transform[FlattenOptions]):
    """A column per field of a struct."""

    Options = FlattenOptions
    makes_columns = True

    def matches(self, kind: pa.DataType) -> bool:
        return bool(pa.types.is_struct(kind)) and not holds_images(kind)

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        return None if pa.types.is_struct(kind) else f"it takes structs: leave {column} out of the transform"

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        flattened = set(self.columns(rows.table.schema, None))
        made: dict[str, pa.Array] = {}
        for column in rows.table.column_names:
            values = rows.column(column)
            for name, field in self._fields(column, values) if column in flattened else ((column, values),):
                if name in made:
                    raise DataError(
                        f"preprocess: flatten gives two columns the name {name!r}",
                        next_step="choose another separator, or rename or drop one before",
                    )
                made[name] = field
        rows.table = pa.table(made)

    def _fields(self, name: str, values: pa.Array) -> Iterator[tuple[str, pa.Array]]:
        if not self.matches(values.type):
            yield name, values
            return
        for index, field in enumerate(values.type):
            # A field of a null struct is null, which `struct_field` sees to, and `StructArray.field` does not.
            yield from self._fields(f"{name}{self.options.separator}{field.name}", pc.struct_field(values, [index]))
