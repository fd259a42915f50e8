"""What describes a cached dataset? A small JSON manifest, which every later stage reads, and a table of its shards beside it.

The table is an Arrow file, named by its digest and written before the manifest. On a local disk it is mapped, so that a million
shards cost a process the pages that it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr

from penstock.config import Section
from penstock.digest import bytes_digest, file_digest
from penstock.errors import DataError
from penstock.ingest.schema import FeedSchema, Split
from penstock.storage import Storage

__all__ = [
    "MANIFEST_VERSION",
    "STREAMS",
    "UNIT_RECORD",
    "DatasetManifest",
    "ShardInfo",
    "ShardTable",
    "Shards",
    "manifest_path",
    "shard_path",
    "unit_path",
]

MANIFEST_VERSION: Literal[2] = 2

UNIT_RECORD = "unit.json"
"""Commits a unit, in its folder. Without it the unit's shards are not valid, and the pipeline makes them again."""

_PENDING = bytes(16).hex()
"""Digest of a shard that is not made yet."""

_SOME = 1 << 14
"""Shards that are made into objects at once."""

_AGAIN = "run the pipeline again: it writes the table anew, and keeps the prepared rows"

_fetched: dict[str, pa.Buffer] = {}
"""The table that this process has fetched last, by its digest: stages and feeds of a run read the same one."""

_REPEATED = pa.dictionary(pa.int32(), pa.string())

_COLUMNS = pa.schema(
    [
        ("unit", _REPEATED),
        ("name", _REPEATED),
        ("split", _REPEATED),
        ("rows", pa.int64()),
        ("size_bytes", pa.int64()),
        ("digest", pa.binary(16)),
    ]
)

STREAMS = "streams"
"""In a manifest's `extra`: the units of each split, each as first file, end of files, first row and end of the piece (or 0, 0),
rows and bytes. Files are counted in the order of units."""


class ShardInfo(Section):
    """One Arrow IPC file that holds one record batch."""

    path: str
    """Relative to the storage root: units/<key of the unit>/<name>."""
    split: Split
    rows: int
    size_bytes: int
    digest: str
    """BLAKE3 of the file (penstock.digest.file_digest)."""
    unit: str
    """Key of the commit unit that made it."""

    @classmethod
    def pending(cls, unit: str, split: Split, number: int, rows: int, size_bytes: int) -> ShardInfo:
        """Describe a shard that is not made yet, with about the size that it will have."""
        path = shard_path(unit, split, number)
        return cls(path=path, split=split, rows=rows, size_bytes=size_bytes, digest=_PENDING, unit=unit)

    @property
    def is_pending(self) -> bool:
        """Whether it was not made when the table was: its unit's record then has its size and digest."""
        return self.digest == _PENDING


class Shards(Sequence[ShardInfo]):
    """Shards in row order, made into objects one by one; `rows` and `size_bytes` of all are int64 arrays [shards]."""

    def __init__(self, table: pa.RecordBatch) -> None:
        self._table = table
        self.rows = _integers(table.column("rows"), np.int64)
        self.size_bytes = _integers(table.column("size_bytes"), np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, index: slice) -> Shards: ...
    def __getitem__(self, index: int | slice) -> ShardInfo | Shards:
        wanted = range(len(self))[index]
        if isinstance(wanted, range):
            return Shards(self._table.slice(wanted.start, len(wanted)))
        return _info(**{name: self._table.column(name)[wanted].as_py() for name in _COLUMNS.names})

    def __iter__(self) -> Iterator[ShardInfo]:
        for begin in range(0, len(self), _SOME):
            columns = self._table.slice(begin, _SOME).columns
            plain = (column.dictionary_decode() if column.type == _REPEATED else column for column in columns)
            yield from map(_info, *(column.to_pylist() for column in plain))

    @property
    def content(self) -> str:
        """Digest of the joined binary digests; another one than the manifest's, which are of lists of hex digests."""
        column = self._table.column("digest")
        return bytes_digest(memoryview(column.buffers()[1])[16 * column.offset : 16 * (column.offset + len(column))])

    @property
    def units(self) -> list[str]:
        """Keys of the units that made them."""
        found: list[str] = self._table.column("unit").unique().to_pylist()
        return found


def _integers(column: pa.Array, kind: Any) -> NDArray[Any]:
    """View a column; its own `to_numpy` loads pandas, in 40 MB of every rank and half a second."""
    return np.frombuffer(column.buffers()[1] or b"", kind)[column.offset : column.offset + len(column)]


def _info(unit: str, name: str, split: Split, rows: int, size_bytes: int, digest: bytes) -> ShardInfo:
    path = unit_path(unit, name)
    # Without checks: the table was checked as a whole.
    return ShardInfo.model_construct(path=path, split=split, rows=rows, size_bytes=size_bytes, digest=digest.hex(), unit=unit)


class ShardTable(Section):
    """What a manifest says of its shards. Compared and sent without the table itself, which `opened` reads."""

    digest: str = ""
    """BLAKE3 of the table's file; empty without shards."""
    counts: dict[Split, int] = Field(default_factory=dict)
    """Shards of each split; those of one are neighbours in the table."""
    size_bytes: dict[Split, int] = Field(default_factory=dict)
    _file: pa.Buffer | None = PrivateAttr(default=None)

    def __getstate__(self) -> dict[Any, Any]:
        return {**super().__getstate__(), "__pydantic_private__": {"_file": None}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardTable) and self.model_dump() == other.model_dump()

    @classmethod
    def of(cls, shards: Sequence[ShardInfo]) -> ShardTable:
        """Make the table of some shards, split by split, and open it."""
        if not shards:
            return cls()
        names = [shard.path.removeprefix(f"{unit_path(shard.unit)}/") for shard in shards]
        columns = {name: [getattr(shard, name) for shard in shards] for name in ("unit", "split", "rows", "size_bytes")}
        columns |= {"name": names, "digest": [bytes.fromhex(shard.digest) for shard in shards]}
        arrays = [pa.array(columns[field.name], field.type) for field in _COLUMNS]
        into = pa.BufferOutputStream()
        with pa.ipc.new_file(into, _COLUMNS) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=_COLUMNS))
        counts, size_bytes = Counter[Split](), Counter[Split]()
        for shard in shards:
            counts[shard.split] += 1
            size_bytes[shard.split] += shard.size_bytes
        made = cls(digest=bytes_digest(memoryview(into.getvalue())), counts=dict(counts), size_bytes=dict(size_bytes))
        made._file = into.getvalue()
        return made

    def opened(self, storage: Storage, key: str) -> ShardTable:
        """Open the table of dataset `key`: on a local disk it is mapped.

        Raises:
            DataError: it is missing, or has another content.
        """
        if self._file is not None or not self.digest:
            return self
        opened = self.model_copy()
        opened._file = _read_table(storage, _table_path(key, self.digest), self.digest)
        return opened

    def write(self, storage: Storage, key: str) -> None:
        """Write an opened table beside the manifest of dataset `key`; the manifest must come after it."""
        if self._file is not None:
            storage.write_bytes(_table_path(key, self.digest), memoryview(self._file).tobytes())

    def shards(self, split: Split | None = None) -> Shards:
        """Return the shards of one split, or of all. Raises ValueError for a table that was not opened."""
        if self._file is None:
            if self.digest:
                raise ValueError(f"the table of shards {self.digest} is not open")
            return Shards(pa.RecordBatch.from_pylist([], _COLUMNS))
        table = pa.ipc.open_file(self._file).get_batch(0)
        if split is None:
            return Shards(table)
        splits = table.column("split")
        if split not in self.counts:
            return Shards(table.slice(0, 0))
        found, number = _integers(splits.indices, np.int32), splits.dictionary.to_pylist().index(split)
        return Shards(table.slice(int((found == number).argmax()), self.counts[split]))


class DatasetManifest(Section):
    """The manifest of a cached dataset. The dataset exists once its manifest is written."""

    version: Literal[2] = MANIFEST_VERSION
    key: str
    """The materialize stage's key."""
    feed_schema: FeedSchema
    rows: dict[Split, int]
    table: ShardTable = ShardTable()
    """The shards in row order: the rows of a split are the rows of its shards, one after the other."""
    units: int = 0
    """Commit units: source files, or pieces of one, whose rows were prepared and committed together."""
    rows_read: int = 0
    """Rows of the source, with those that were left out."""
    content_digest: str
    """Digest over the shards' digests in order."""
    split_digests: dict[Split, str] = Field(default_factory=dict)
    """Digest over the shards of each split; with `materialize.overlap` over the keys of its units, known before the shards."""
    extra: dict[str, Any] = Field(default_factory=dict)

    @property
    def rows_left_out(self) -> str:
        """Count of the rows left out under `data.invalid` or by map_batches, with reasons, as text; empty for none."""
        reasons: dict[str, int] = self.extra.get("dropped", {})
        if not reasons:
            return ""
        return f"{sum(reasons.values()):,} ({', '.join(f'{reason}: {rows:,}' for reason, rows in reasons.items())})"

    @property
    def num_shards(self) -> int:
        """Shards of all splits; 0 if rows are not on disk."""
        return sum(self.table.counts.values())

    def opened(self, storage: Storage) -> DatasetManifest:
        """Open the table of shards, which `shards` and `shards_of` read. Raises DataError if it is missing or damaged."""
        return self.model_copy(update={"table": self.table.opened(storage, self.key)})

    @property
    def shards(self) -> Shards:
        """The shards of an opened manifest, in row order."""
        return self.table.shards()

    def shards_of(self, split: Split) -> Shards:
        """List the shards of one split of an opened manifest, in row order."""
        return self.table.shards(split)

    def parts_of(self, split: Split) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return rows and bytes of each shard of an opened manifest, or of each unit of a stream: int64 [parts] each."""
        if STREAMS not in self.extra:
            shards = self.shards_of(split)
            return shards.rows, shards.size_bytes
        units = np.array(self.extra[STREAMS].get(split, ()), np.int64).reshape(-1, 6)
        return units[:, 4], units[:, 5]

    def write(self, storage: Storage) -> None:
        """Write the table, if it is open, and then the manifest."""
        self.table.write(storage, self.key)
        storage.write_json(manifest_path(self.key), self.model_dump(mode="json"))

    @classmethod
    def read(cls, storage: Storage, key: str) -> DatasetManifest | None:
        """Read and open a dataset's manifest; None if there is none, or one of another version, or its table is damaged."""
        try:
            found = storage.read_record(manifest_path(key), cls)
            return None if found is None else found.opened(storage)
        except DataError:
            return None


def _read_table(storage: Storage, path: str, digest: str) -> pa.Buffer:
    try:
        if storage.is_local:
            local = storage.local_path(path)
            found, file = file_digest(local), pa.memory_map(str(local)).read_buffer()  # not read through the map: it would stay
        else:
            file = _fetched.get(digest) or pa.py_buffer(storage.read_bytes(path, in_one=True))
            found = bytes_digest(memoryview(file))
    except FileNotFoundError as error:
        raise DataError(f"{storage.uri(path)} is missing: the table of the dataset's shards", next_step=_AGAIN) from error
    if found != digest:
        raise DataError(f"{storage.uri(path)} has another content than its manifest names", next_step=_AGAIN)
    if not storage.is_local:
        _fetched.clear()
        _fetched[digest] = file
    return file


def manifest_path(key: str) -> str:
    """Return the path of a dataset's manifest, relative to the storage root."""
    return f"datasets/{key}/manifest.json"


def _table_path(key: str, digest: str) -> str:
    return f"datasets/{key}/shards-{digest}.arrow"


def shard_path(unit: str, split: Split, number: int) -> str:
    """Return the path of a unit's shard of a split, relative to the storage root."""
    return unit_path(unit, f"{split}-{number:05d}.arrow")


def unit_path(key: str, name: str = "") -> str:
    """Return the path of a unit's folder, or of a file in it, relative to the storage root."""
    return f"units/{key}/{name}".rstrip("/")
