"""Does a boosted model in the pipeline cost what the library costs by hand? 28 columns of numbers, two classes, the same cores.

By hand: the rows in memory, the library's own `train` with two threads. In the pipeline: two workers of one thread, which
measure every round. What counts are the rounds; the start of Ray, the workers and the reading of rows are left aside.

    python -m benchmarks.boosted [--rows 2000000] [--rounds 50]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xgboost

from tests.drills.project import Command

COLUMNS = 28
PARAMS: dict[str, dict[str, Any]] = {"xgboost": {"max_depth": 6}, "lightgbm": {"num_leaves": 31}}


def rows_of(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    features = random.standard_normal((count, COLUMNS), dtype=np.float32)
    score = features[:, 0] * features[:, 1] + features[:, 2] - 0.5 * features[:, 3] ** 2
    return features, (score + random.standard_normal(count, dtype=np.float32) > 0).astype(np.int64)


def by_hand(name: str, features: np.ndarray, labels: np.ndarray, rounds: int) -> float:
    began_s = time.perf_counter()
    if name == "xgboost":
        params = {**PARAMS[name], "objective": "binary:logistic", "nthread": 2, "tree_method": "hist"}
        data = xgboost.QuantileDMatrix(features, labels)
        xgboost.train(params, data, rounds, evals=[(data, "train")], verbose_eval=False)
    else:
        params = {**PARAMS[name], "objective": "binary", "num_threads": 2, "force_row_wise": True, "verbosity": -1}
        rows = lightgbm.Dataset(features, labels, params=params)
        lightgbm.train({**params, "metric": "binary_logloss"}, rows, rounds, valid_sets=[rows])
    return time.perf_counter() - began_s


def in_pipeline(name: str, folder: Path, rounds: int) -> float:
    """Seconds from the workers' first row to the last round, as the workers' own points tell."""
    file = folder / f"{name}.yaml"
    train = {"framework": name, "params": PARAMS[name], "epochs": rounds, "workers": 2, "checkpoint": {"every_s": None}}
    spec = {"name": name, "data": {"format": "parquet", "train": "rows/", "label": "label"}, "train": train}
    file.write_text(json.dumps({**spec, "storage": ".penstock", "shuffle": {"mode": "none"}}))  # JSON is YAML
    result = Command("run", str(file), "--json", "--until", "train").finish(timeout_s=1800)
    journal = sorted((folder / ".penstock" / "runs" / result["run"] / "journal").iterdir())
    times_s = [json.loads(line)["t"] / 1000 for part in journal for line in part.read_text().splitlines()]
    attempt = json.loads(max((folder / ".penstock/runs" / result["run"] / "attempts").iterdir()).read_text())
    print(name, "train stage", [s["seconds"] for s in result["stages"] if s["name"] == "train"], attempt.get("started"))
    return (times_s[-1] - times_s[0]) * rounds / (rounds - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    features, labels = rows_of(given.rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        columns = {f"x{number}": features[:, number] for number in range(COLUMNS)}
        pq.write_table(pa.table({**columns, "label": labels}), folder / "rows" / "part.parquet")
        for library in PARAMS:
            hand_s, pipeline_s = by_hand(library, features, labels, given.rounds), in_pipeline(library, folder, given.rounds)
            print(f"{library}: by hand {hand_s:.1f} s, rounds in the pipeline {pipeline_s:.1f} s, {pipeline_s / hand_s:.2f}")


if __name__ == "__main__":
    main()
