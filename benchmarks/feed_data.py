"""The rows every contender reads: generated once, the same for all. The label is the row's number, so that a lost row shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from ingest.dataset import ColumnInfo, DatasetManifest, FeedSchema, ShardInfo
from ingest.shards import tensor_array, with_provenance, write_shard
from penstock.digest import file_digest

__all__ = ["TABLES", "Rows", "arrays", "manifest"]

CHUNK = 10_000


@dataclass(frozen=True)
class Rows:
    """One benchmark's rows: `rows` times `x` (dtype, shape) and an int64 label."""

    name: str
    rows: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape)) + 8

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(x, label) in row order, some thousand at a time."""
        for start in range(0, self.rows, CHUNK):
            count = min(CHUNK, self.rows - start)
            rng = np.random.default_rng([7, start])
            if self.dtype == "uint8":
                x = rng.integers(0, 256, (count, *self.shape), np.uint8)
            else:
                x = rng.standard_normal((count, *self.shape), np.float32)
            yield x, np.arange(start, start + count, dtype=np.int64)


TABLES = {
    "images": Rows("images", 200_000, "uint8", (32, 32, 3)),
    "table": Rows("table", 2_000_000, "float32", (28,)),
}


def arrays(rows: Rows, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The rows as two memory-mapped arrays, written on the first call."""
    paths = folder / "x.npy", folder / "label.npy"
    if not paths[1].exists():
        folder.mkdir(parents=True, exist_ok=True)
        x = np.lib.format.open_memmap(paths[0], "w+", rows.dtype, (rows.rows, *rows.shape))
        label = np.lib.format.open_memmap(folder / "label.tmp", "w+", "int64", (rows.rows,))
        for values, numbers in rows.chunks():
            x[numbers[0] : numbers[-1] + 1] = values
            label[numbers[0] : numbers[-1] + 1] = numbers
        x.flush()
        label.flush()
        (folder / "label.tmp").rename(paths[1])
    return np.load(paths[0], mmap_mode="r"), np.load(paths[1], mmap_mode="r")


def manifest(rows: Rows, folder: Path, shard_bytes: int = 64 << 20) -> DatasetManifest:
    """The rows as a cached dataset of penstock in `folder`, written on the first call."""
    path = folder / "manifest.json"
    if not path.exists():
        (folder / "units" / "u").mkdir(parents=True, exist_ok=True)
        per_shard = shard_bytes // rows.row_bytes // CHUNK * CHUNK or CHUNK
        schema = FeedSchema(
            columns=(ColumnInfo(name="x", dtype=rows.dtype, shape=rows.shape), ColumnInfo(name="label", dtype="int64")),
            label="label",
        )
        shards, tables = [], []
        for values, numbers in rows.chunks():
            table = pa.table({"x": tensor_array(values), "label": tensor_array(numbers)})
            tables.append(with_provenance(table, np.zeros(len(numbers)), numbers))
            if sum(part.num_rows for part in tables) >= per_shard or numbers[-1] + 1 == rows.rows:
                name = f"units/u/train-{len(shards):05d}.arrow"
                count = write_shard(folder / name, tables)
                tables = []
                size, digest = (folder / name).stat().st_size, file_digest(folder / name)
                shards.append(ShardInfo(path=name, split="train", rows=count, size_bytes=size, digest=digest, unit="u"))
        made = DatasetManifest(
            key="bench", feed_schema=schema, rows={"train": rows.rows}, shards=tuple(shards), units=(), content_digest="bench"
        )
        path.write_text(made.model_dump_json())
    return DatasetManifest.model_validate_json(path.read_text())
