"""The benchmarks' rows in penstock's own format: what its feed reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.loaders.feed_data import CHUNK, Rows
from penstock.digest import file_digest
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.manifest import DatasetManifest, ShardInfo, ShardTable
from penstock.ingest.materialize.shard_file import with_provenance, write_shard
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.storage import Storage

__all__ = ["manifest"]


def manifest(rows: Rows, folder: Path, shard_bytes: int = 64 << 20) -> DatasetManifest:
    """The rows as a cached dataset of penstock in `folder`, written on the first call."""
    storage = Storage(str(folder))
    found = DatasetManifest.read(storage, "bench")
    if found is None:
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
            key="bench", feed_schema=schema, rows={"train": rows.rows}, table=ShardTable.of(shards), content_digest="bench"
        )
        made.write(storage)
        return made
    return found
