"""How much longer is it to the first optimizer step where there is much data?

    python -m benchmarks.large [--rounds 3] [--gigabytes 16] [--out benchmarks/results]

1. 500 MB of CSV that nobody has read before, beside 1,000 rows of it, and beside a program by hand that prepares the rows with
   pyarrow in two processes: the ratio is that of what the rows add to the start, to what the program takes.
2. Prepared rows that are there already, 16 GB of them beside 16 MB: the train stage alone has to run.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.machine import describe
from benchmarks.outcome import options_parser, save
from benchmarks.prepare import _as_text, _written

VERSIONS = ("prefect", "ray", "torch", "pyarrow")
CSV_ROWS, FILES, SHORT_ROWS = 1_800_000, 8, 1_000
PARQUET_ROWS = 130_000
"""16 MB when they are prepared."""

PIPELINE = """\
name: large
data: {{format: {format}, train: {train}, label: label}}
preprocess:
  - standard_scaler: {{columns: '*'}}
  - concatenator: {{columns: '*', output: features}}
train: {{recipe: model.py:Net, max_steps: {steps}, batch_rows: 1024, workers: 2}}
register: {{name: large}}
"""

MODEL = """\
import os, time
import torch


class Net:
    def build_model(self, schema):
        return torch.nn.Linear(28, 2)

    def loss(self, model, batch):
        if torch.distributed.is_initialized() and not os.path.exists({mark!r}):
            open({mark!r}, "w").write(str(time.time()))
        return torch.nn.functional.cross_entropy(self.predict(model, batch), batch["label"])

    def predict(self, model, batch):
        return model(batch["features"].float())
"""

BY_HAND = """\
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from benchmarks.prepare import _batches, _by_hand

if __name__ == "__main__":
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        _by_hand(_batches, Path(sys.argv[1]), Path(sys.argv[2]), pool)
"""


def main() -> None:
    """Measure, and write `large.json`."""
    parser = options_parser(3)
    parser.add_argument("--gigabytes", type=int, default=16)
    options = parser.parse_args()
    parquet = _written(options.data / "large-parquet", FILES, CSV_ROWS // FILES)
    source = _as_text(parquet, "csv")
    short = _as_text(_written(options.data / "large-short", 1, SHORT_ROWS), "csv")
    found: dict[str, list[float]] = {"start": [], "csv": [], "by hand": [], "small": [], "large": []}
    scratch = options.data / "large-projects"
    shutil.rmtree(scratch, ignore_errors=True)
    block = _written(options.data / "large-block", 1, PARQUET_ROWS)
    small, large = _prepared(scratch / "small", block, 1), _prepared(scratch / "large", block, 1000 * options.gigabytes // 16)
    for number in range(options.rounds):
        found["start"].append(_first_step(_project(scratch / f"short-{number}", "csv", short)))
        found["csv"].append(_first_step(_project(scratch / f"csv-{number}", "csv", source)))
        found["by hand"].append(_program(source, scratch))
        for name, project in (("small", small), ("large", large)):
            _write(project, "parquet", project / "data", steps=number + 2)
            found[name].append(_first_step(project))
        print({name: round(values[-1], 1) for name, values in found.items()}, file=sys.stderr, flush=True)
    middle = {name: statistics.median(values) for name, values in found.items()}
    rounds = zip(found["start"], found["csv"], found["by hand"], strict=True)
    save(
        options.out,
        "large",
        {
            "machine": describe(VERSIONS),
            "rounds": options.rounds,
            "csv_mb": round(sum(file.stat().st_size for file in source.iterdir()) / 1e6),
            "gigabytes": options.gigabytes,
            "seconds": found,
            "median": middle,
            "csv_of_by_hand": statistics.median((csv - start) / hand for start, csv, hand in rounds),
            "large_adds_s": statistics.median(
                large - small for large, small in zip(found["large"], found["small"], strict=True)
            ),
        },
    )
    shutil.rmtree(scratch)


def _prepared(folder: Path, block: Path, copies: int) -> Path:
    """A project whose rows are prepared: those of one file, so many times."""
    data = folder / "data"
    data.mkdir(parents=True)
    (file,) = block.iterdir()
    for copy in range(copies):
        os.link(file, data / f"{copy:05}.parquet")
    _write(folder, "parquet", data, steps=1)
    _call(["run", str(folder / "pipeline.yaml"), "--until", "materialize"])
    return folder


def _project(folder: Path, format: str, source: Path) -> Path:
    """A new project, whose source files nobody has hashed before."""
    data = folder / "data"
    data.mkdir(parents=True)
    for file in source.iterdir():
        shutil.copy(file, data)
    _write(folder, format, data, steps=1)
    return folder


def _write(folder: Path, format: str, data: Path, steps: int) -> None:
    (folder / "pipeline.yaml").write_text(PIPELINE.format(format=format, train=data, steps=steps))
    (folder / "model.py").write_text(MODEL.format(mark=str(folder / "mark")))


def _first_step(project: Path) -> float:
    mark = project / "mark"
    mark.unlink(missing_ok=True)
    began = time.time()
    _call(["run", str(project / "pipeline.yaml")])
    return float(mark.read_text()) - began


def _program(source: Path, scratch: Path) -> float:
    script, out = scratch / "by_hand.py", scratch / "by-hand"
    script.write_text(BY_HAND)
    began = time.time()
    subprocess.run([sys.executable, str(script), str(source), str(out)], check=True, env={**os.environ, "PYTHONPATH": "."})
    seconds = time.time() - began
    shutil.rmtree(out)
    return seconds


def _call(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "penstock", *command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
