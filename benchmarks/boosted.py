"""Does a boosted model in the pipeline cost what the library costs by hand? 28 columns of numbers, two classes, the same cores.

    python -m benchmarks.boosted [--rounds 3] [--rows 2000000] [--trees 50] [--out benchmarks/results]

By hand: the rows in memory, the library's own `train` with two threads. In the pipeline: one worker with two threads, and two
workers with one, which exchange what they found after every level of a tree. All measure the training loss after every tree.
What is timed is from the end of the first tree to the end of the last: starts, reading and the making of bins are left aside.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xgboost

from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, learning_times, options_parser, save
from tests.drills.project import Command

COLUMNS = 28
PARAMS: dict[str, dict[str, Any]] = {"xgboost": {"max_depth": 6}, "lightgbm": {"num_leaves": 31}}


def main() -> None:
    """Measure, and write `boosted_xgboost.json` and `boosted_lightgbm.json`."""
    parser = options_parser(3)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--trees", type=int, default=50)
    options = parser.parse_args()
    features, labels = _rows(options.rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows").mkdir()
        columns = {f"x{number}": features[:, number] for number in range(COLUMNS)}
        pq.write_table(pa.table({**columns, "label": labels}), folder / "rows" / "part.parquet")
        for library in PARAMS:
            names = [f"{library} by hand", f"penstock, {library}, one worker", f"penstock, {library}, two workers"]
            found: dict[str, list[float]] = {name: [] for name in names}
            for number in range(options.rounds):
                found[names[0]].append(_by_hand(library, features, labels, options.trees))
                for workers in (1, 2):
                    found[names[workers]].append(_in_pipeline(library, folder, options.trees, workers))
                times = ", ".join(f"{seconds[-1]:.1f} s" for seconds in found.values())
                print(f"{library} round {number + 1}: {times}", file=sys.stderr, flush=True)
            machine = describe(("penstock", "xgboost", "xgboost-cpu", "lightgbm", "ray"))
            result = {
                "machine": machine,
                "library": library,
                "rows": options.rows,
                "trees": options.trees,
                "rounds": options.rounds,
            }
            save(options.out, f"boosted_{library}", {**result, "variants": beside_the_first(found, "seconds")})


def _rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    features = random.standard_normal((count, COLUMNS), dtype=np.float32)
    score = features[:, 0] * features[:, 1] + features[:, 2] - 0.5 * features[:, 3] ** 2
    return features, (score + random.standard_normal(count, dtype=np.float32) > 0).astype(np.int64)


def _by_hand(name: str, features: np.ndarray, labels: np.ndarray, trees: int) -> float:
    ends: list[float] = []
    if name == "xgboost":

        class Watch(xgboost.callback.TrainingCallback):
            def after_iteration(self, *_: Any) -> bool:
                ends.append(time.perf_counter())
                return False

        params = {**PARAMS[name], "objective": "binary:logistic", "nthread": 2, "tree_method": "hist"}
        data = xgboost.QuantileDMatrix(features, labels)
        xgboost.train(params, data, trees, evals=[(data, "train")], verbose_eval=False, callbacks=[Watch()])
    else:
        params = {**PARAMS[name], "objective": "binary", "num_threads": 2, "force_row_wise": True, "verbosity": -1}
        rows = lightgbm.Dataset(features, labels, params=params)
        watch = [lambda _: ends.append(time.perf_counter())]
        lightgbm.train({**params, "metric": "binary_logloss"}, rows, trees, valid_sets=[rows], callbacks=watch)
    assert len(ends) == trees
    return ends[-1] - ends[0]


def _in_pipeline(name: str, folder: Path, trees: int, workers: int) -> float:
    """Seconds from the first tree's end to the last one's, by the points that rank 0 keeps of every tree."""
    file = folder / f"{name}.yaml"
    train: dict[str, Any] = {"framework": name, "params": PARAMS[name], "epochs": trees, "checkpoint": {"every_s": None}}
    train |= {"workers": workers, "cpus_per_worker": 2 // workers}
    spec = {"name": name, "data": {"format": "parquet", "train": "rows/", "label": "label"}, "train": train}
    file.write_text(json.dumps({**spec, "storage": ".penstock", "shuffle": {"mode": "none"}}))  # JSON is YAML
    result = Command("run", str(file), "--json", "--fresh", "--until", "train").finish(timeout_s=1800)
    ends = learning_times(folder, result)
    return (ends[max(ends)] - ends[min(ends)]) * (trees - 1) / (max(ends) - min(ends))


if __name__ == "__main__":
    main()
