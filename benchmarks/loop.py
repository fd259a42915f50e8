"""What does penstock's training loop cost beside one written by hand: feed, exact state, logging, checkpoints?

    python -m benchmarks.loop [--rounds 5] [--steps 1500] [--out benchmarks/results]

Two processes train a small network with DDP (gloo) on shuffled batches of 1,024 rows. By hand: tensors in memory, a permutation
each epoch, nothing logged and nothing saved. A round measures every variant; ratios are taken inside the round. What is counted
is the time of the last `steps` steps: every variant also runs the 200 steps before them, and that time is taken off.

What logging takes is too little to see between two such measurements. It is timed where it happens, on rank 0: making the
points of every step and handing them on, and the CPU time of packing them for the driver.
"""

from __future__ import annotations

import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.cached_dataset import manifest
from benchmarks.feed_data import Rows, arrays
from benchmarks.loop_recipe import Net
from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, rows_per_s, save
from ingest.order import make_order
from ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.usercode import capture
from training.group import Group
from training.job import TrainJob
from training.mailbox import Event
from training.reporting import FirstRank
from training.spec import TrainSpec
from training.worker import run_rank

ROWS = Rows("loop", 500_000, "float32", (28,))
BATCH, WORLD, WARM_STEPS = 1024, 2, 200
NO_SAVE = {"every_s": None, "every_epoch": False}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "by hand, tensors in memory": None,
    "penstock": NO_SAVE,
    "penstock, a checkpoint every 50 steps": {**NO_SAVE, "every_steps": 50},
}
VERSIONS = ("numpy", "torch", "ray")


class Quiet:
    """A mailbox that packs what it is given as Ray would, keeps nothing and never asks for anything."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def put(self, events: list[Event]) -> bool:
        """Forget the events."""
        began = time.thread_time()
        pickle.dumps(events)
        self.seconds += time.thread_time() - began
        return False


class LoggingTimer:
    """How long rank 0 is in `FirstRank.steps` and `FirstRank.validated`, in this process and from now on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("steps", "validated"):
            setattr(FirstRank, name, self._timed(getattr(FirstRank, name)))

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            began = time.perf_counter()
            method(*args)
            self.seconds += time.perf_counter() - began

        return timed


def main() -> None:
    """Measure, and write `loop.json`."""
    parser = options_parser(5)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    home = options.data / ROWS.name
    arrays(ROWS, home / "arrays")
    manifest(ROWS, home / "penstock")
    rows = options.steps * BATCH
    shares: list[float] = []

    def measure(name: str) -> float:
        seconds, share = _measure(name, home, options.steps)
        if VARIANTS[name] is NO_SAVE:
            shares.append(share)
        return rows / seconds

    found = rows_per_s("loop", VARIANTS, options.rounds, measure)
    result = {
        "machine": describe(VERSIONS),
        "rounds": options.rounds,
        "steps": options.steps,
        "batch_rows": BATCH,
        "workers": WORLD,
        "variants": beside_the_first(found, "rows_per_s"),
        "logging_share": shares,
        "logging_percent": 100 * statistics.median(shares),
    }
    save(options.out, "loop", result)


def _measure(name: str, home: Path, steps: int) -> tuple[float, float]:
    """Seconds for `steps` steps, without the start and the steps that warm up; and the share of logging in it."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        ranks = [context.Process(target=_rank, args=(name, str(home), folder, rank, steps, answers)) for rank in range(WORLD)]
        for rank in ranks:
            rank.start()
        times = [answers.get(timeout=900) for _ in ranks]
        for rank in ranks:
            rank.join()
    seconds = max(loop for loop, _ in times)
    return seconds, max(logging for _, logging in times) / seconds


def _rank(name: str, home: str, folder: str, rank: int, steps: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    checkpoint = VARIANTS[name]
    if checkpoint is None:
        answers.put((_by_hand(Path(home, "arrays"), rank, steps), 0.0))
    else:
        timer, times = LoggingTimer(), []
        for count in (WARM_STEPS, WARM_STEPS + steps):
            client, logged, began = Quiet(), timer.seconds, time.perf_counter()
            run_rank(_job(Path(home, "penstock"), Path(folder, str(count)), count, checkpoint), Group.current(_CPU), client)
            times.append((time.perf_counter() - began, timer.seconds - logged + client.seconds))
        (warm, logging_warm), (whole, logging_whole) = times
        answers.put((whole - warm, logging_whole - logging_warm))
    dist.destroy_process_group()


_CPU = torch.device("cpu")


def _by_hand(folder: Path, rank: int, steps: int) -> float:
    x, label = (torch.from_numpy(np.array(values)) for values in arrays(ROWS, folder))
    torch.manual_seed(17)
    recipe = Net()
    model = torch.nn.parallel.DistributedDataParallel(recipe.build_model(None))
    optimizer = recipe.optimizer(model)
    done, epoch, began = 0, 0, 0.0
    while done < WARM_STEPS + steps:
        order = torch.randperm(len(label), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            if done == WARM_STEPS:
                began = time.perf_counter()
            own = order[start + rank * BATCH // WORLD : start + (rank + 1) * BATCH // WORLD]
            loss = recipe.loss(model, {"x": x[own], "label": label[own]})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == WARM_STEPS + steps:
                break
        epoch += 1
    return time.perf_counter() - began


def _job(data: Path, run: Path, steps: int, checkpoint: dict[str, Any]) -> TrainJob:
    made = manifest(ROWS, data)
    order = make_order(ShuffleSpec(seed=17), ROWS.rows)
    settings = {"batch_rows": BATCH, "workers": WORLD, "epochs": 1000, "max_steps": steps, "checkpoint": checkpoint}
    return TrainJob(
        run_storage=Storage(str(run)),
        data_storage=Storage(str(data)),
        manifest=made,
        order=order,
        spec=TrainSpec.model_validate({"recipe": "loop_recipe.py:Net", **settings}),
        seed=17,
        code=capture("loop_recipe.py:Net", Path(__file__).parent),
        attempt=1,
        pipeline="loop",
        identity={"data": made.content_digest, "order": order.fingerprint, "batch_rows": str(BATCH)},
    )


if __name__ == "__main__":
    main()
