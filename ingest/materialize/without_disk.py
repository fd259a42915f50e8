"""How are rows prepared without a cache on disk? Once for the manifest (`cache: none`), or into Ray's object store (`memory`).

Both use the code of `cache: disk` with a storage that keeps nothing, so that bad rows are found in the same way and the
manifest is the same, content digest included, but for its empty list of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import ray

from penstock.digest import digest_of
from penstock.ingest.columns.arrays import Block
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.unit_plan import plan_units
from penstock.ingest.manifest import STREAMS, DatasetManifest, ShardTable
from penstock.ingest.materialize.build import materialize, plan_jobs
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.materialize.unit import UnitRecord, hashes_path
from penstock.ingest.prepare import ANYWHERE, PrepareSpec
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.ray_tasks import raising_ours, ray_streams
from penstock.ingest.read.inspection import PART_BYTES, Piece
from penstock.ingest.schema import FeedSchema, Split
from penstock.ingest.spec import MaterializeSpec
from penstock.progress import Progress
from penstock.storage import Storage

__all__ = ["MemoryDataset", "RowSource"]

Item = TypeVar("Item")

Result = TypeVar("Result")


class StreamUnit(NamedTuple):
    """Work of one task of a stream: the files of a commit unit, or a piece of a large file."""

    files: tuple[SourceFile, ...]
    piece: Piece | None
    rows: int = 0
    """Prepared rows of the split."""
    size_bytes: int = 0
    """About their size."""


@dataclass(frozen=True)
class RowSource:
    """Rows that are prepared and not kept on disk. Picklable: it is sent to the workers that stream."""

    preparation: Preparation
    spec: MaterializeSpec
    piece_bytes: int = PART_BYTES
    """A file of at least twice this size is prepared in pieces of about this size, as on disk."""
    where: PrepareSpec = ANYWHERE
    """What the preparing tasks take, and on which nodes they run."""

    def describe(self, key: str, progress: Progress) -> DatasetManifest:
        """Prepare every row once and return the manifest, without shards. Runs on the driver; Ray must be initialised.

        Raises:
            DataError: as `penstock.ingest.materialize.build.materialize`.
        """
        manifest = self._pass(key, progress, None)
        made: dict[tuple[str, Split], list[int]] = {}
        for shard in manifest.shards:
            counts = made.setdefault((shard.unit, shard.split), [0, 0])
            counts[:] = counts[0] + shard.rows, counts[1] + shard.size_bytes
        numbers = {(file.location, file.name): number for number, file in enumerate(self._files_by_unit())}
        streams: dict[Split, list[list[int]]] = {split: [] for split in self.preparation.data.locations}
        for job in plan_jobs(self.preparation, self.spec, _Nowhere(), self.piece_bytes):
            begin = numbers[job.files[0].location, job.files[0].name]
            for split, of_split in streams.items():
                if found := made.get((job.key, split)):
                    of_split.append([begin, begin + len(job.files), *(job.preparation.piece or (0, 0)), *found])
        return manifest.model_copy(update={"table": ShardTable(), "extra": {**manifest.extra, STREAMS: streams}})

    def put(self, key: str, progress: Progress) -> tuple[DatasetManifest, dict[Split, MemoryDataset]]:
        """Prepare all rows into Ray's object store, where they stay as long as the result lives. Runs on the driver.

        A block has the rows of a shard. Ray makes the blocks of a lost node again, and spills to disk.

        Returns:
            The manifest, without shards, and the rows of each split that has some.

        Raises:
            DataError: as `penstock.ingest.materialize.build.materialize`.
        """
        blocks: dict[str, Any] = {}
        manifest = self._pass(key, progress, blocks)
        datasets: dict[Split, MemoryDataset] = {}
        for split in self.preparation.data.locations:
            shards = manifest.shards_of(split)
            if shards:
                datasets[split] = MemoryDataset(
                    schema=manifest.feed_schema,
                    split=split,
                    blocks=tuple(blocks[shard.path] for shard in shards),
                    block_rows=tuple(shards.rows.tolist()),
                    size_bytes=int(shards.size_bytes.sum()),
                    content=digest_of([shards.content]),
                )
        return manifest.model_copy(update={"table": ShardTable()}), datasets

    def units(self, manifest: DatasetManifest, split: Split) -> list[StreamUnit]:
        """List the units with rows of `split`, in row order, as they are on record in the manifest of `describe`."""
        files = self._files_by_unit()
        return [
            StreamUnit(tuple(files[begin:end]), (first, last) if last else None, rows, size_bytes)
            for begin, end, first, last, rows, size_bytes in manifest.extra[STREAMS].get(split, ())
        ]

    def _files_by_unit(self) -> list[SourceFile]:
        return [file for unit in plan_units(self.preparation.snapshot.files, self.spec.unit_bytes) for file in unit]

    def tables(self, split: Split, unit: StreamUnit) -> Iterator[pa.Table]:
        """Read and prepare the rows of `split` in `unit`, in their order; never an empty table. Runs anywhere."""
        for found, table in replace(self.preparation.only(unit.files), piece=unit.piece).tables():
            if found == split:
                yield table

    def _pass(self, key: str, progress: Progress, blocks: dict[str, Any] | None) -> DatasetManifest:
        """Make all units without keeping their shards; put references to their columns into `blocks` by shard path."""
        beside: dict[str, Any] = {}

        def parallel(fn: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
            # The caller owns the objects that a generator task yields, so they outlive the worker.
            make = partial(_make_unit, fn, blocks is not None)
            for references in ray_streams(make, [job for task in items for job in task], where=self.where):
                with raising_ours():
                    made = ray.get(next(references))
                (result,) = made.values()
                record = result.record
                if record is not None:
                    beside.update(zip(_beside(record), references, strict=False))
                if blocks is not None and record is not None:
                    blocks.update(zip((shard.path for shard in record.shards), references, strict=True))
                yield made

        return materialize(
            key=key,
            preparation=self.preparation,
            spec=self.spec,
            storage=_Nowhere(kept=beside),
            progress=progress,
            parallel=parallel,
            piece_bytes=self.piece_bytes,
            is_kept=False,
        )


class _Nowhere(Storage):
    """A storage that stays empty. `take` is called with each finished file; Ray holds the files in `kept`."""

    def __init__(self, take: Callable[[Path, str], None] | None = None, kept: Mapping[str, Any] | None = None) -> None:
        super().__init__("nowhere://rows")
        self._take, self._kept = take, {} if kept is None else kept

    def __reduce__(self) -> tuple[object, ...]:
        return _Nowhere, ()

    def size(self, path: str) -> int:
        raise FileNotFoundError(path)

    def sizes(self, path: str = "") -> dict[str, int]:
        return {}

    def read_bytes(self, path: str, *, in_one: bool = False) -> bytes:
        if path not in self._kept:
            raise FileNotFoundError(path)
        return bytes(ray.get(self._kept[path]))

    def write_bytes(self, path: str, data: bytes) -> None:
        """Discard the data."""

    def put_file(self, local: str | Path, path: str) -> None:
        if self._take is not None:
            self._take(Path(local), path)

    def delete(self, path: str) -> None:
        """Do nothing."""


def _make_unit(fn: Callable[[Any], Any], keep: bool, job: Any) -> Iterator[Any]:
    """Yield the unit's result, its files besides shards, and, if `keep`, the columns of its shards in the record's order."""
    columns: dict[str, Block] = {}
    beside: dict[str, bytes] = {}

    def take(local: Path, path: str) -> None:
        if not path.endswith(".arrow"):
            beside[path] = local.read_bytes()
        if not path.endswith(".arrow") or not keep:
            return
        reader = open_shard(local)
        # Copied, because the file is deleted; arrays of Arrow keep it open.
        views = {column.name: reader.column(column.name) for column in reader.columns}
        columns[path] = {name: view if isinstance(view, pa.Array) else view.copy() for name, view in views.items()}

    made = fn([replace(job, storage=_Nowhere(take))])
    yield made
    (result,) = made.values()
    if result.record is not None:
        for path in _beside(result.record):
            yield beside.pop(path)
        for shard in result.record.shards:
            if keep:
                yield columns.pop(shard.path)


def _beside(record: UnitRecord) -> list[str]:
    """List the files besides a unit's shards that are needed until the manifest is written."""
    return [hashes_path(record.key, split) for split in record.hashed_rows()]


@dataclass(frozen=True)
class MemoryDataset:
    """One split's prepared rows in Ray's object store, to be sent to workers. The process that made it must stay alive."""

    schema: FeedSchema
    split: Split
    blocks: tuple[Any, ...]
    """Object references, each of a `Block`."""
    block_rows: tuple[int, ...]
    size_bytes: int
    """About the size of all blocks."""
    content: str
    """Digest of the values, block by block."""

    @property
    def num_rows(self) -> int:
        """Rows of the split."""
        return sum(self.block_rows)
