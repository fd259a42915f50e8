"""Ray Data as a feed, in its own processes: one or two consumer actors, as Ray Train's workers would be.

Settings: tensor column, 2 CPUs, `prefetch_batches=2`, a local shuffle buffer of 10,000 rows; materialized in the object store,
or streamed from Parquet.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.loaders.consumers import BATCH
from benchmarks.loaders.feed_data import Rows
from penstock.ingest.columns.arrays import tensor_array

__all__ = ["RAY_CONTENDERS", "measure_ray", "write_parquet"]


RAY_CONTENDERS = {"Ray Data, materialized, local shuffle": True, "Ray Data, Parquet, local shuffle": False}
"""Name -> whether the rows are put into the object store first."""


def measure_ray(name: str, rows: Rows, folder: Path, world: int) -> float:
    """Rows per second of all consumers together in the second epoch."""
    import ray
    import ray.data

    write_parquet(rows, folder)
    ray.init(
        "local",
        num_cpus=max(2, world),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=4 << 30,
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        data = ray.data.read_parquet(str(folder))
        if RAY_CONTENDERS[name]:
            data = data.materialize()

        @ray.remote(num_cpus=0)
        class Consumer:
            def run(self, shard: Any) -> tuple[int, float, float]:
                # Whole epochs, as many for every consumer: one that stops early would leave the others waiting for ever.
                for _ in range(2):
                    # The start of an epoch counts: Ray Data reads ahead before it hands out the first batch.
                    count, began = 0, time.perf_counter()
                    for batch in shard.iter_torch_batches(
                        batch_size=BATCH, local_shuffle_buffer_size=10_000, local_shuffle_seed=1, prefetch_batches=2
                    ):
                        count += len(batch["label"])
                return count, began, time.perf_counter()

        shards = data.streaming_split(world, equal=True)
        got = ray.get([Consumer.remote().run.remote(shard) for shard in shards])  # type: ignore[attr-defined]
        # Consumers do not read at the same moments: from the first one's begin to the last one's end. One clock for all.
        counts, begins, ends = zip(*got, strict=True)
        return float(sum(counts) / (max(ends) - min(begins)))
    finally:
        ray.shutdown()


def write_parquet(rows: Rows, folder: Path) -> None:
    """The rows as Parquet files with a tensor column, written on the first call."""
    if (folder / "part-0000.parquet").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    held: list[pa.Table] = []
    part = 0
    for x, label in rows.chunks():
        held.append(pa.table({"x": tensor_array(np.ascontiguousarray(x)), "label": label}))
        if len(held) == 2 or label[-1] + 1 == rows.rows:
            pq.write_table(pa.concat_tables(held), folder / f"part-{part:04d}.parquet")
            held, part = [], part + 1
