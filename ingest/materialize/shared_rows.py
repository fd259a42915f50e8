"""Which rows of validation and test are also in another split? Rows are compared by the hashes that units store.

Held-out rows are compared a part at a time, which bounds the memory.
"""

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

PART_ROWS = 1 << 24

_FILTER_BITS = 27

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
    rows, first = 0, ""
    of_rows = sum(record.hashed_rows().get(held_out, 0) for record in records)
    for part in _parts(records, storage, held_out):
        wanted = np.unique(np.concatenate([hashes for _, hashes in part]))
        seen = _seen(wanted, records, storage, other)
        for record, hashes in part:
            hits = np.flatnonzero(np.isin(hashes, seen))
            if len(hits) and not first:
                place = _place(record, held_out, int(hits[0]), files, storage)
                first = f"{place} is {_first_place(records, other, hashes[hits[0]], files, storage)}"
            rows += len(hits)
    return SharedRows(held_out=held_out, other=other, rows=rows, of_rows=of_rows, first=first) if rows else None


def _hashes(records: Sequence[UnitRecord], storage: Storage, split: Split) -> Iterator[tuple[UnitRecord, np.ndarray]]:
    for record in records:
        if split in record.hashed_rows():
            yield record, np.frombuffer(storage.read_bytes(hashes_path(record.key, split)), "<u8")


def _parts(records: Sequence[UnitRecord], storage: Storage, split: Split) -> Iterator[list[tuple[UnitRecord, np.ndarray]]]:
    part: list[tuple[UnitRecord, np.ndarray]] = []
    for record, hashes in _hashes(records, storage, split):
        part.append((record, hashes))
        if sum(len(held) for _, held in part) >= PART_ROWS:
            yield part
            part = []
    if part:
        yield part


def _seen(wanted: np.ndarray, records: Sequence[UnitRecord], storage: Storage, other: Split) -> np.ndarray:
    """Select those of the sorted hashes `wanted` that rows of `other` have."""
    bits = np.uint64(min(_FILTER_BITS, len(wanted).bit_length() + 3))
    # A table rules out nearly all rows 20 times as fast as a binary search.
    maybe = np.zeros(1 << int(bits), np.bool_)
    maybe[wanted >> (np.uint64(64) - bits)] = True
    found = [wanted[:0]]
    for _, hashes in _hashes(records, storage, other):
        candidates = hashes[maybe[hashes >> (np.uint64(64) - bits)]]
        found.append(np.intersect1d(candidates, wanted))
    return np.unique(np.concatenate(found))


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
