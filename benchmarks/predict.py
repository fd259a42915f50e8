"""What does `penstock predict` cost beside a loop by hand that reads, transforms and predicts with the same model?

    python -m benchmarks.predict [--rounds 3] [--rows 4000000] [--out benchmarks/results]

By hand: two warm processes of one thread, files dealt out between them. Each batch is read with pyarrow, scaled with numpy,
predicted by the same network in batches of 8,192 rows, and written to Parquet with all its columns. The command is timed from
the first unit that begins to the last that is committed; what it takes as a whole, servers included, is given beside.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import safetensors.torch
import torch

from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, save
from penstock.flows.verbs.init import create_project

BY_HAND, COMMAND = "by hand: pyarrow, numpy, torch in two processes", "penstock predict"
FILES, BATCH_ROWS = 16, 8192


def main() -> None:
    """Measure, and write `predict.json`."""
    parser = options_parser(3)
    parser.add_argument("--rows", type=int, default=4_000_000)
    options = parser.parse_args()
    project = options.data / "predict" / "project"
    rows = options.data / "predict" / f"rows-{options.rows}"
    model = _model(project)
    _write_rows(project, rows, options.rows)
    found: dict[str, list[float]] = {BY_HAND: [], COMMAND: []}
    whole: list[float] = []
    for number in range(options.rounds):
        hand, ours = options.data / "predict" / "by-hand", options.data / "predict" / "out"
        for folder in (hand, ours):
            shutil.rmtree(folder, ignore_errors=True)
        found[BY_HAND].append(options.rows / _by_hand(model, rows, hand))
        seconds, whole_s = _command(project, rows, ours)
        found[COMMAND].append(options.rows / seconds)
        whole.append(whole_s)
        _compare(hand, ours)
        said = {name: f"{values[-1]:,.0f} rows/s" for name, values in found.items()}
        print(f"predict round {number + 1}: {said}, the command as a whole {whole_s:.1f} s", file=sys.stderr, flush=True)
    result = {"machine": describe(("prefect", "ray", "torch", "pyarrow")), "rows": options.rows, "whole_s": whole}
    save(options.out, "predict", {**result, "variants": beside_the_first(found, "rows_per_s")})


def _model(project: Path) -> Path:
    """The folder of a model that the tabular template has trained."""
    if not project.exists():
        create_project(project, "tabular")
        command = [sys.executable, "-m", "penstock", "run", "pipeline.yaml", "--set", "train.epochs=3", "--json"]
        subprocess.run(command, cwd=project, check=True, stdout=subprocess.DEVNULL)
    (spec,) = project.glob(".penstock/mlflow/**/model.json")
    return spec.parent


def _write_rows(project: Path, folder: Path, count: int) -> None:
    """The template's rows again and again with some noise, as float64 in Parquet, with an id."""
    if folder.exists():
        return
    table = arrow_csv.read_csv(project / "data" / "breast_cancer.csv").drop_columns(["diagnosis"])
    values, random = np.stack([column.to_numpy() for column in table.columns], axis=1), np.random.default_rng(5)
    folder.mkdir(parents=True)
    for number in range(FILES):
        rows = count // FILES
        taken = values[random.integers(0, len(values), rows)] * random.normal(1, 0.01, (rows, values.shape[1]))
        columns = {name: taken[:, index] for index, name in enumerate(table.column_names)}
        ids = pa.array(np.arange(rows) + number * rows)
        pq.write_table(pa.table({"id": ids, **columns}), folder / f"part-{number:02}.parquet")


def _by_hand(model: Path, rows: Path, out: Path) -> float:
    out.mkdir()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        list(processes.map(_warm, range(8)))
        began = time.monotonic()
        list(processes.map(partial(_score_file, model, out), sorted(rows.iterdir())))
        return time.monotonic() - began


def _warm(_number: int) -> None:
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    time.sleep(0.2)


def _score_file(model: Path, out: Path, file: Path) -> None:
    spec: dict[str, Any] = json.loads((model / "model.json").read_text())
    (scaler,) = [step for step in spec["raw"]["fitted"]["steps"] if "standard_scaler" in json.dumps(step["step"])]
    learnt = {column["column"]: column for column in scaler["columns"]}
    names = [name for name in spec["raw"]["columns"] if name in learnt]
    mean = np.array([learnt[name]["center"] for name in names])
    scale = np.array([learnt[name]["scale"] for name in names])
    network = torch.nn.Sequential(
        torch.nn.Linear(30, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 2)
    ).eval()
    network.load_state_dict(safetensors.torch.load_file(model / "model.safetensors"))
    classes, writer = pa.array(spec["feed_schema"]["classes"]), None
    with torch.inference_mode(), pq.ParquetFile(file) as source:
        for batch in source.iter_batches(65536):
            values = np.stack([batch.column(name).to_numpy() for name in names], axis=1)
            features = torch.from_numpy(((values - mean) / scale).astype(np.float32))
            scores = torch.cat([network(part).softmax(dim=1) for part in features.split(BATCH_ROWS)]).double()
            offsets = pa.array(np.arange(len(scores) + 1, dtype=np.int32) * 2)
            table = pa.table(
                {
                    **{name: batch.column(name) for name in batch.schema.names},
                    "prediction": classes.take(pa.array(scores.argmax(dim=1).numpy())),
                    "probability": scores.max(dim=1).values.numpy(),
                    "probabilities": pa.ListArray.from_arrays(offsets, pa.array(scores.numpy().reshape(-1))),
                }
            )
            writer = writer or pq.ParquetWriter(out / file.name, table.schema)
            writer.write_table(table)
    assert writer is not None
    writer.close()


def _command(project: Path, rows: Path, out: Path) -> tuple[float, float]:
    """Seconds from the first unit's begin to the last one's end, and of the command as a whole."""
    began = time.monotonic()
    words = ["predict", "models:/diagnosis@candidate", str(rows), "--output", str(out), "--format", "parquet", "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")}
    subprocess.run(
        [sys.executable, "-m", "penstock", *words], cwd=project, check=True, stdout=subprocess.DEVNULL, env=environment
    )
    whole_s = time.monotonic() - began
    units = list((out / "_penstock" / "units").iterdir())
    first = min(unit.stat().st_mtime - json.loads(unit.read_text())["seconds"] for unit in units)
    return max(unit.stat().st_mtime for unit in units) - first, whole_s


def _compare(hand: Path, ours: Path) -> None:
    columns = ["id", "prediction", "probability"]
    one, other = (pq.read_table(folder, columns=columns).sort_by("id") for folder in (hand, ours))
    assert one["id"].equals(other["id"])
    same = np.mean(np.array(one["prediction"]) == np.array(other["prediction"]))
    assert same > 0.9999 and np.allclose(one["probability"], other["probability"], atol=1e-4), same


if __name__ == "__main__":
    main()
