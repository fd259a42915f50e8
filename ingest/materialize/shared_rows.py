"""Which rows of validation and test are also in another split? Rows are compared by the hashes that units store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from penstock.config import Section
from penstock.ingest.columns.arrays import PROVENANCE_COLUMNS
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.materialize.unit import UnitRecord, hashes_path
from penstock.ingest.schema import Split
from penstock.messages import counted
from penstock.storage import Storage

__all__ = ["SharedRows", "shared_rows"]

Files = Mapping[str, tuple[SourceFile, ...]]
"""Files of each unit, by its key."""


class SharedRows(Section):
    """Rows of one split that are also in another."""

    held_out: Split
    other: Split
    rows: int
    """Shared rows of `held_out`."""
    of_rows: int
    """All rows of `held_out`."""
    first: str
    """Place of the first one in both splits."""

    def __str__(self) -> str:
        return f"{self.rows:,} of {self.of_rows:,} rows of {self.held_out} are in {self.other}, too; the first: {self.first}"


def shared_rows(records: Sequence[UnitRecord], files: Files, storage: Storage) -> list[SharedRows]:
    """Count rows of validation and test that are in train, and rows of test that are in validation. Runs on the driver."""
    pairs: tuple[tuple[Split, Split], ...] = (("validation", "train"), ("test", "train"), ("test", "validation"))
    return [found for held_out, other in pairs if (found := _shared(records, files, storage, held_out, other))]


def _shared(records: Sequence[UnitRecord], files: Files, storage: Storage, held_out: Split, other: Split) -> SharedRows | None:
    held = list(_hashes(records, storage, held_out))
    if not held:
        return None
    wanted = np.unique(np.concatenate([hashes for _, hashes in held]))
    seen = np.unique(np.concatenate([wanted[:0], *(_both(hashes, wanted) for _, hashes in _hashes(records, storage, other))]))
    rows, of_rows, first = 0, sum(len(hashes) for _, hashes in held), ""
    for record, hashes in held:
        hits = np.flatnonzero(np.isin(hashes, seen))
        if len(hits) and not first:
            place = _place(record, held_out, int(hits[0]), files, storage)
            first = f"{place} is {_first_place(records, other, hashes[hits[0]], files, storage)}"
        rows += len(hits)
    return SharedRows(held_out=held_out, other=other, rows=rows, of_rows=of_rows, first=first) if rows else None


def _both(hashes: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the hashes that are in `wanted`, which is sorted. Neighbours are found faster, so they are sorted, too."""
    hashes = np.sort(hashes)
    return hashes[wanted[np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)] == hashes]


def _hashes(records: Sequence[UnitRecord], storage: Storage, split: Split) -> Iterator[tuple[UnitRecord, np.ndarray]]:
    for record in records:
        if split in record.hashed_rows():
            yield record, np.frombuffer(storage.read_bytes(hashes_path(record.key, split)), "<u8")


def _first_place(records: Sequence[UnitRecord], split: Split, wanted: np.uint64, files: Files, storage: Storage) -> str:
    for record, hashes in _hashes(records, storage, split):
        hits = np.flatnonzero(hashes == wanted)
        if len(hits):
            return _place(record, split, int(hits[0]), files, storage)
    raise AssertionError("a hash that was found before is missing")


def _place(record: UnitRecord, split: Split, index: int, files: Files, storage: Storage) -> str:
    """Format the file and row of row `index` of the unit's rows of `split`; only its files if its shards are not kept."""
    of_unit = files[record.key]
    for shard in record.shards:
        if shard.split != split:
            continue
        if index < shard.rows:
            try:
                content = storage.read_bytes(shard.path)
            except FileNotFoundError:
                break
            batch = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0)
            file, row = (batch.column(batch.schema.get_field_index(name))[index].as_py() for name in PROVENANCE_COLUMNS)
            return f"{of_unit[file].uri}, row {row} (from 0)"
        index -= shard.rows
    return f"a row of {of_unit[0].uri}" + (f" or of {counted(len(of_unit) - 1, 'file')} after it" if len(of_unit) > 1 else "")
