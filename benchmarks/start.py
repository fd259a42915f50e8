"""How long is it from the command to the first optimizer step, and to the end of a run that finds everything done?

    python -m benchmarks.start [--rounds 3] [--out benchmarks/results]

Five things, one after the other in every round: a bare Ray Train script (two workers, the same rows and network, nothing
saved); `penstock run` in a new project, which starts a Prefect server of its own, makes its databases, prepares the rows and
checks all of it; the same against a Prefect server that runs already; the command again, which reuses every stage; and the
first batch of the feed benchmark's rows, from a new process with its libraries imported, as a training worker is when it opens
its feed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.loaders.cached_dataset import manifest
from benchmarks.loaders.contenders import penstock_feed
from benchmarks.loaders.feed_data import TABLES, Rows
from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, save

BARE = "by hand: a bare Ray Train script"
NEW, SERVED, AGAIN = "penstock run, a new project", "the same, a Prefect server running", "the same command again, to its end"
VERSIONS = ("prefect", "ray", "torch", "mlflow")

SCRIPT = """\
import sys, time
import pyarrow.csv, ray, torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model

folder, mark = sys.argv[1:]

def loop(config):
    import ray.train
    table = pyarrow.csv.read_csv(folder + "/data/breast_cancer.csv")
    label = torch.tensor([value == "malignant" for value in table["diagnosis"].to_pylist()]).long()
    x = torch.stack([torch.tensor(table[name].to_numpy()) for name in table.column_names if name != "diagnosis"], 1).float()
    x = (x - x.mean(0)) / x.std(0)
    model = prepare_model(torch.nn.Sequential(torch.nn.Linear(30, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank = ray.train.get_context().get_world_rank()
    torch.nn.functional.cross_entropy(model(x[rank:32:2]), label[rank:32:2]).backward()
    optimizer.step()
    if rank == 0:
        open(mark, "w").write(str(time.time()))

ray.init("local", num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
TorchTrainer(
    loop,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=folder + "/ray"),
).fit()
"""

MARKED = """

_Recipe = Diagnosis


class Diagnosis(_Recipe):
    def loss(self, model, batch):
        import os, time
        if torch.distributed.is_initialized() and not os.path.exists({mark!r}):
            open({mark!r}, "w").write(str(time.time()))
        return super().loss(model, batch)
"""


def main() -> None:
    """Measure, and write `start.json`."""
    parser = options_parser(3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in (BARE, NEW, SERVED, AGAIN)}
    first: dict[str, list[float]] = {name: [] for name in TABLES}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, seconds in _round(Path(folder)).items():
                found[name].append(seconds)
                print(f"start round {number + 1} {name:<40} {seconds:6.1f} s", file=sys.stderr, flush=True)
        for name, values in first.items():
            values.append(_in_a_new_process(TABLES[name], options.data / name / "penstock"))
            print(f"start round {number + 1} first batch of {name:<25} {values[-1]:6.1f} ms", file=sys.stderr, flush=True)
    result = {
        "machine": describe(VERSIONS),
        "rounds": options.rounds,
        "variants": beside_the_first(found, "seconds"),
        "first_batch": {name: {"ms": values, "median": statistics.median(values)} for name, values in first.items()},
    }
    save(options.out, "start", result)


def _round(folder: Path) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")}
    found = {}
    new = _project(folder / "new", environment)
    script = folder / "bare.py"
    script.write_text(SCRIPT)
    found[BARE] = _first_step([str(script), str(new), str(folder / "bare.mark")], folder / "bare.mark", environment)
    run = ["-m", "penstock", "run", str(new / "pipeline.yaml")]
    found[NEW] = _first_step(run, new / "mark", environment)
    began = time.time()
    _call(run, environment)
    found[AGAIN] = time.time() - began
    served = _project(folder / "served", environment)
    with _prefect(folder / "prefect", environment) as url:
        run = ["-m", "penstock", "run", str(served / "pipeline.yaml")]
        found[SERVED] = _first_step(run, served / "mark", {**environment, "PREFECT_API_URL": url})
    return found


def _in_a_new_process(rows: Rows, folder: Path) -> float:
    manifest(rows, folder)
    for shard in folder.rglob("*.arrow"):
        shard.read_bytes()  # as a run before has left it: its pages are in memory
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_first_batch, rows, folder).result()


def _first_batch(rows: Rows, folder: Path) -> float:
    """Milliseconds from opening prepared rows to the first batch of a global order, as one of two ranks."""
    began = time.perf_counter()
    next(penstock_feed(rows, folder, 0, 2, 0, mode="global", prefetch=2))
    return (time.perf_counter() - began) * 1e3


def _project(folder: Path, environment: dict[str, str]) -> Path:
    _call(["-m", "penstock", "init", str(folder), "--template", "tabular"], environment)
    with open(folder / "model.py", "a") as model:
        model.write(MARKED.format(mark=str(folder / "mark")))
    return folder


@contextlib.contextmanager
def _prefect(folder: Path, environment: dict[str, str]) -> Iterator[str]:
    """The address of a Prefect server that is up before the clock starts."""
    script = "import sys; from pathlib import Path; from penstock.flows.servers.services import prefect_api\n"
    script += "with prefect_api(Path(sys.argv[1])) as service: print(service.api_url, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", script, str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert holder.stdout is not None
    yield holder.stdout.readline().strip()
    holder.communicate()


def _first_step(command: list[str], mark: Path, environment: dict[str, str]) -> float:
    began = time.time()
    _call(command, environment)
    return float(mark.read_text()) - began


def _call(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
