"""How many rows a second does a Ray Train loop get from penstock's shard, and how many from Ray Data's?

    python -m benchmarks.ray_loop [--rounds 3] [--out benchmarks/results]

One training function, on two workers, that does nothing with its batches of 256: under `TorchTrainer` with a Ray dataset, read
from Parquet as it goes or put into the object store first, shuffled in a local buffer of 10,000 rows; and as `train.loop` of a
pipeline, where penstock prepares the same files and shuffles all of them. A worker's first epoch warms up and does not count.
The rows are those of the feed benchmark.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.loaders.feed_data import TABLES, Rows
from benchmarks.loaders.ray_contenders import write_parquet
from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, rows_per_s, save

STORED, STREAMED, OURS = "Ray Data, materialized", "Ray Data, Parquet", "penstock, train.loop"
VERSIONS = ("ray", "torch", "numpy", "pyarrow")
EPOCHS = 3
WORKERS = 2
LOCAL_SHUFFLE = {"local_shuffle_buffer_size": 10_000, "local_shuffle_seed": 1}

LOOP = """\
import json, pathlib, tempfile, time
import ray.train


def train_func(config):
    shard, rank = ray.train.get_dataset_shard("train"), ray.train.get_context().get_world_rank()
    for epoch in range(config["epochs"]):
        rows, began = 0, time.time()
        for batch in shard.iter_torch_batches(batch_size=256, prefetch_batches=2, **config["options"]):
            rows += len(batch["label"])
        spent = json.dumps({"rows": rows, "began": began, "ended": time.time()})
        pathlib.Path(config["out"], f"{epoch}-{rank}.json").write_text(spent)
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "nothing").touch()
            checkpoint = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
            ray.train.report({"rows": rows}, checkpoint=checkpoint)
"""

BY_RAY = """\
import json, sys
import ray, ray.data
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from loop import train_func

source, stored, config = sys.argv[1], sys.argv[2] == "stored", json.loads(sys.argv[3])
ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False, object_store_memory=4 << 30)
ray.data.DataContext.get_current().enable_progress_bars = False
data = ray.data.read_parquet(source)
TorchTrainer(
    train_func,
    train_loop_config=config,
    datasets={"train": data.materialize() if stored else data},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=config["out"] + "/ray"),
).fit()
"""

PIPELINE = """\
name: loop
data: {{format: parquet, train: {source}}}
shuffle: {{mode: global, seed: 17}}
train:
  loop: loop.py:train_func
  params: {{epochs: {epochs}, options: {{}}, out: {out}}}
  workers: 2
"""


def main() -> None:
    """Measure, and write `ray_loop_images.json` and `ray_loop_table.json`."""
    options = options_parser(3).parse_args()
    scratch = options.data / "ray-loop"
    for name, rows in TABLES.items():
        source = options.data / name / "parquet"
        write_parquet(rows, source)
        shutil.rmtree(scratch, ignore_errors=True)
        project = scratch / "project"
        project.mkdir(parents=True)
        (project / "loop.py").write_text(LOOP)
        (project / "by_ray.py").write_text(BY_RAY)

        def measure(variant: str, rows: Rows = rows, source: Path = source, project: Path = project) -> float:
            return _measure(variant, rows, source, project)

        found = rows_per_s(name, (STORED, STREAMED, OURS), options.rounds, measure)
        result = {"machine": describe(VERSIONS), "rounds": options.rounds, "table": name, "rows": rows.rows}
        save(options.out, f"ray_loop_{name}", result | {"variants": beside_the_first(found, "rows_per_s")})
    shutil.rmtree(scratch)


def _measure(variant: str, rows: Rows, source: Path, project: Path) -> float:
    out = project / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if variant == OURS:
        shutil.rmtree(project / ".penstock", ignore_errors=True)
        (project / "pipeline.yaml").write_text(PIPELINE.format(source=source, epochs=EPOCHS, out=out))
        command = ["-m", "penstock", "run", str(project / "pipeline.yaml"), "--until", "train"]
    else:
        config = json.dumps({"epochs": EPOCHS, "options": LOCAL_SHUFFLE, "out": str(out)})
        command = [str(project / "by_ray.py"), str(source), "stored" if variant == STORED else "streamed", config]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    rates = []
    for epoch in range(1, EPOCHS):
        ranks: list[dict[str, Any]] = [json.loads((out / f"{epoch}-{rank}.json").read_text()) for rank in range(WORKERS)]
        read = sum(rank["rows"] for rank in ranks)
        assert rows.rows - WORKERS * 256 <= read <= rows.rows, f"{variant} has read {read} of {rows.rows} rows"
        rates.append(read / (max(rank["ended"] for rank in ranks) - min(rank["began"] for rank in ranks)))
    return statistics.median(rates)


if __name__ == "__main__":
    main()
