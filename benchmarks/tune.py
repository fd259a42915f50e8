"""What does a sweep cost beside its trials' own work?

    python -m benchmarks.tune [--rounds 5] [--out benchmarks/results]

Eight short trials of the tabular template (with a wide network, so that a step takes some 30 ms), one worker each, two at
once. By hand: the same eight trainings, each by `run_rank` on the rows that the sweep prepared, with its validations and its
checkpoints, in two processes that have torch loaded and do nothing else. A sweep is timed from the line that begins its first
trial to the one that ends its last, on a cluster that is up: what is added are Ray's tasks, Prefect's, the tracker, records,
and the first import of torch in two processes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from benchmarks.loop import Quiet
from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, save
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.init import create_project
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.shuffle.order import Order
from penstock.storage import Storage
from penstock.tasks.project import Project
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Ledger
from penstock.training.job import TrainJob
from penstock.training.on_ray.worker import run_rank
from penstock.training.ranks import Group

BY_HAND, SWEEP = "by hand: run_rank in two warm processes", "penstock tune"
AT_ONCE, TRIALS = 2, 8
SECTION = f"""
tune:
  space: {{train.learning_rate: {{log_range: [0.001, 0.1]}}}}
  trials: {TRIALS}
  concurrent: {AT_ONCE}
"""


def main() -> None:
    """Measure, and write `tune.json`."""
    parser = options_parser(5)
    parser.add_argument("--epochs", type=int, default=60, help="of a trial; an epoch is 11 steps")
    parser.add_argument("--hidden", type=int, default=32768, help="width of the network: how long a step takes")
    options = parser.parse_args()
    found: dict[str, list[float]] = {BY_HAND: [], SWEEP: []}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            file = _project(Path(folder, "project"), options.epochs, options.hidden)
            swept_s, values, digests = _sweep(file)
            by_hand_s, by_hand = _by_hand(file, values, Path(folder, "by-hand"))
            assert by_hand == digests, "the weights are the same"
            found[SWEEP].append(swept_s)
            found[BY_HAND].append(by_hand_s)
        print(f"tune round {number + 1}: {swept_s:.1f} s, by hand {by_hand_s:.1f} s", file=sys.stderr, flush=True)
    result = {"machine": describe(("prefect", "ray", "torch", "mlflow")), "trials": TRIALS, "epochs": options.epochs}
    result["hidden"] = options.hidden
    save(options.out, "tune", {**result, "variants": beside_the_first(found, "seconds")})


def _project(folder: Path, epochs: int, hidden: int) -> Path:
    create_project(folder, "tabular")
    file = folder / "pipeline.yaml"
    text = file.read_text().replace("workers: 2", "workers: 1").replace("epochs: 20", f"epochs: {epochs}")
    assert "hidden: 32" in text, text
    file.write_text(text.replace("hidden: 32", f"hidden: {hidden}") + SECTION)
    return file


def _sweep(file: Path) -> tuple[float, list[dict[str, object]], list[str]]:
    """Seconds that the trials take in a sweep, their values, and the digests of their weights."""
    command = [sys.executable, "-m", "penstock", "tune", str(file), "--json"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None and process.stdout is not None
    seen: list[tuple[float, str]] = []
    for line in process.stderr:
        seen.append((time.monotonic(), line))
    said = json.loads(process.stdout.read().splitlines()[-1])
    if process.wait() != 0:
        raise RuntimeError("".join(line for _, line in seen[-20:]))
    began = min(at for at, line in seen if line.startswith("trial ") and " begins: " in line)
    ended = max(at for at, line in seen if line.startswith("trial ") and " done: " in line)
    trials = said["trials"]
    return ended - began, [trial["values"] for trial in trials], [trial["weights_digest"] for trial in trials]


def _by_hand(file: Path, values: list[dict[str, object]], folder: Path) -> tuple[float, list[str]]:
    with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn")) as processes:
        list(processes.map(_warm, range(4 * AT_ONCE)))
        began = time.monotonic()
        trained = [processes.submit(_train, file, each, folder / str(number)) for number, each in enumerate(values)]
        digests = [each.result() for each in trained]
        return time.monotonic() - began, digests


def _warm(_number: int) -> None:
    torch.ones(1).sum()
    time.sleep(0.2)


def _train(file: Path, values: dict[str, object], folder: Path) -> str:
    """Train as a trial does; the digest of its weights."""
    from penstock.training.checkpoint.outcome import outcome_of

    loaded = load_spec(file, [f"{key}={value}" for key, value in values.items()])
    project = Project(loaded.spec, loaded.base_dir)
    ledger = Ledger(project.storage)
    keys = stage_keys(project, ledger.stage_output)
    prepared, shuffled = (ledger.stage_output(name, keys[name].key) for name in ("materialize", "shuffle"))
    assert prepared is not None and shuffled is not None
    job = TrainJob(
        run_storage=Storage(str(folder)),
        data_storage=project.storage,
        manifest=DatasetManifest.model_validate(prepared),
        order=Order.model_validate(shuffled["order"]),
        spec=loaded.spec.train,
        seed=loaded.spec.shuffle.seed,
        code=project.recipe,
        attempt=1,
        pipeline=loaded.spec.name,
    )
    run_rank(job, Group(0, 1, torch.device("cpu")), Quiet())
    return outcome_of(job, "finished").weights_digest


if __name__ == "__main__":
    main()
