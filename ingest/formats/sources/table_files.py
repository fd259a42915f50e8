"""Which tables are nothing but Parquet files? These are read as they lie, by every worker, and no row is written a second time.

A table is one if each file has its columns with their types, and if the columns that a file lacks are in the folders' names.
Deleted rows, renamed columns and files of an earlier schema take the table's library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.casts import canonical_type
from penstock.ingest.columns.type_text import type_text
from penstock.ingest.files.listing import SourceFile, fingerprints, listing_problem, values_in_folders
from penstock.ingest.files.opening import STORE_REQUESTS, open_input, probe_endpoint
from penstock.ingest.formats.arrow import ArrowReader
from penstock.ingest.formats.parquet import ParquetReader
from penstock.ingest.formats.reader import FileFacts, Reader
from penstock.ingest.schema import Split
from penstock.storage import filesystem_of
from penstock.stores import is_local

__all__ = ["TableFiles", "TableReader", "plain_files"]

_FROM_TEXT: tuple[Callable[[pa.DataType], bool], ...] = (pa.types.is_string, pa.types.is_integer, pa.types.is_date32)
"""Types whose values in folders' names read alike everywhere."""

_FIELD_ID = b"PARQUET:field_id"


class TableFiles(Section):
    """The files that a table's log names, where the table is nothing but files."""

    root: str
    """Folder or URL."""
    names: tuple[str, ...]
    """Below the root."""
    types: dict[str, str]
    """Column in the names of the folders -> its type as text."""

    def listed(self, split: Split) -> list[SourceFile]:
        """Return the files as they are now. Raises DataError, ServiceError."""
        probe_endpoint(self.root)
        fs, root = filesystem_of(self.root)
        names = sorted(self.names)

        def found(name: str) -> dict[str, Any]:
            try:
                return fs.info(f"{root}/{name}")  # type: ignore[no-any-return]
            except FileNotFoundError as error:
                raise DataError(
                    f"{self.root}/{name}: is gone, and the table's log names it",
                    next_step="name a newer version of the table; what cleans it up (VACUUM, expire_snapshots) takes old "
                    "ones away",
                ) from error
            except Exception as error:  # every store has errors of its own
                raise listing_problem(f"data.{split}", f"{self.root}/{name}", error) from error

        with ThreadPoolExecutor(STORE_REQUESTS) as pool:
            infos = dict(zip((f"{root}/{name}" for name in names), pool.map(found, names), strict=True))
        prints = fingerprints(fs, infos, by_content=is_local(self.root))
        return [
            SourceFile(
                uri=f"{self.root}/{name}",
                name=name,
                location=split,
                size_bytes=int(info["size"] or 0),
                fingerprint=fingerprint,
                folder_types=tuple(sorted(self.types.items())),
            )
            for name, info, fingerprint in zip(names, infos.values(), prints, strict=True)
        ]


def plain_files(
    root: str, names: Sequence[str], schema: pa.Schema, partitions: Mapping[str, Sequence[str | None]], *, by_id: bool = False
) -> TableFiles | None:
    """Return the table as files, or None if it is more than that; reads their footers.

    Args:
        root: the table's folder or URL.
        names: of its files, below `root`.
        schema: of the table.
        partitions: column -> its value in each file as text, for the columns that the files lack.
        by_id: whether fields, those within others too, go by the ids in `schema`: a name may have belonged to another field.
            Then each file has all columns, whatever its folders are called.
    """
    kinds = {field.name: _kind(field.type) for field in schema if field.name not in partitions}
    of_folders = {name: canonical_type(schema.field(name).type) for name in partitions}
    if not names or not all(any(test(kind) for test in _FROM_TEXT) for kind in of_folders.values()):
        return None
    folders = [] if by_id else [values_in_folders(name) for name in names]
    if any(found != {name: values[number] for name, values in partitions.items()} for number, found in enumerate(folders)):
        return None

    def is_alike(name: str) -> bool:
        with open_input(f"{root}/{name}") as stream:
            found = pq.read_schema(stream)
        return (not by_id or _ids(found) == _ids(schema)) and {field.name: _kind(field.type) for field in found} == kinds

    with ThreadPoolExecutor(STORE_REQUESTS) as pool:
        try:
            if not all(pool.map(is_alike, names)):
                return None
        except Exception:  # what cannot be opened so may be opened by the table's library, which has settings of its own
            return None
    return TableFiles(root=root, names=tuple(names), types={name: type_text(kind) for name, kind in of_folders.items()})


def _ids(fields: Iterable[pa.Field], above: str = "") -> dict[str, bytes]:
    """Return the id of each field by its path; below a list or map, whose parts have no names of their own, by its number."""
    found: dict[str, bytes] = {}
    for number, field in enumerate(fields):
        path = f"{above}.{field.name if above == '' or above.endswith('{') else number}"
        found[path] = (field.metadata or {}).get(_FIELD_ID, b"")
        inner = [field.type.field(index) for index in range(field.type.num_fields)]
        found |= _ids(inner, path + "{" * pa.types.is_struct(field.type))
    return found


def _kind(kind: pa.DataType) -> str:
    """Name a type without the width of its offsets, 32 or 64 bits, which a table does not know."""
    return str(canonical_type(kind)).replace("large_", "")


class TableReader(Reader):
    """The files of a table, or the Arrow files that its rows were written to."""

    def __init__(self) -> None:
        self._arrow, self._parquet = ArrowReader(), ParquetReader()

    def _of(self, file: SourceFile) -> Reader:
        return self._arrow if file.name.endswith(".arrow") else self._parquet

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read the footer, or every batch."""
        return self._of(file).inspect(file)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows."""
        return self._of(file).tables(file, schema, batch_rows)

    def pieces(self, file: SourceFile, piece_bytes: int) -> list[tuple[int, int]]:
        """Row groups, or batches."""
        return self._of(file).pieces(file, piece_bytes)

    def piece(self, file: SourceFile, schema: pa.Schema, batch_rows: int, first_row: int, end: int) -> Iterator[pa.Table]:
        """Yield some of the rows."""
        return self._of(file).piece(file, schema, batch_rows, first_row, end)
