"""What does penstock's training loop cost beside one written by hand: feed, exact state, logging, checkpoints?

    python -m benchmarks.loop [--rounds 5] [--steps 1500] [--out benchmarks/results]

Two processes train a small network with DDP (gloo) on shuffled batches of 1,024 rows. By hand: tensors in memory, a permutation
each epoch, nothing logged and nothing saved. A round measures every variant; ratios are taken inside the round. What is counted
is the time of the last `steps` steps: every variant also runs the 200 steps before them, and that time is taken off.

What logging takes is too little to see between two such measurements. It is timed where it happens, on rank 0: making the
points of every step and handing them on, and the CPU time of packing them for the driver. What a checkpoint takes is seen
within one run: the twenty steps from each save on, which it is written beside, against each of the three tens after them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.loaders.cached_dataset import manifest
from benchmarks.loaders.feed_data import Rows, arrays
from benchmarks.loop_recipe import Net
from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, rows_per_s, save
from penstock.ingest.feed.batch import Batch
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.training.events import Event
from penstock.training.job import TrainJob
from penstock.training.loop.observer import FirstRank, Observer
from penstock.training.on_ray.worker import run_rank
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture

ROWS = Rows("loop", 500_000, "float32", (28,))
BATCH, WORLD, WARM_STEPS, EVERY = 1024, 2, 200, 50
NO_SAVE = {"every_s": None, "every_epoch": False}
PLAIN, SAVING = "penstock", f"penstock, a checkpoint every {EVERY} steps"
VARIANTS: dict[str, dict[str, Any] | None] = {
    "by hand, tensors in memory": None,
    PLAIN: NO_SAVE,
    SAVING: {**NO_SAVE, "every_steps": EVERY},
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


class CheckpointTimer:
    """When every step of this process begins, from now on: what checkpoints take is in it."""

    def __init__(self) -> None:
        self._began: list[float] = []
        method = Observer.batch

        def stamped(observer: Observer, step: int, epoch: int, batch: Batch) -> None:
            if step == 0:
                self._began.clear()
            self._began.append(time.perf_counter())
            method(observer, step, epoch, batch)

        Observer.batch = FirstRank.batch = stamped  # type: ignore[method-assign]

    def shares(self, warm_steps: int) -> list[float]:
        """The time that each checkpoint of the last training has added, as a part of the `EVERY` steps it is for."""
        shares = []
        for saved in range(warm_steps, len(self._began) - EVERY, EVERY):
            # A step's time is stamped after the save that comes before it: begun one step earlier, the first ten hold the save.
            stamps = self._began[saved - 1 : saved + EVERY : 10]
            first, second, *others = (end - begin for begin, end in itertools.pairwise(stamps))
            usual = statistics.median(others)
            shares.append((first + second - 2 * usual) / (usual * EVERY / 10))
        return shares


def main() -> None:
    """Measure, and write `loop.json`."""
    parser = options_parser(5)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    if options.steps <= EVERY:
        parser.error(f"--steps is {options.steps}; a checkpoint is seen beside the {EVERY} steps after it, so take more")
    home = options.data / ROWS.name
    arrays(ROWS, home / "arrays")
    manifest(ROWS, home / "penstock")
    rows = options.steps * BATCH
    logging, checkpoints, with_a_core = [], [], []

    def measure(name: str) -> float:
        times = _measure(name, home, options.steps, WORLD)
        if name == PLAIN:
            logging.append(times.logging_s / times.loop_s)
        elif name == SAVING:
            checkpoints.append(times.checkpoint_shares)
            with_a_core.append(_measure(name, home, options.steps, 1).checkpoint_shares)
        return rows / times.loop_s

    found = rows_per_s("loop", VARIANTS, options.rounds, measure)
    result = {
        "machine": describe(VERSIONS),
        "rounds": options.rounds,
        "steps": options.steps,
        "batch_rows": BATCH,
        "workers": WORLD,
        "variants": beside_the_first(found, "rows_per_s"),
        "logging_share": logging,
        "logging_percent": 100 * statistics.median(logging),
        **_percent("checkpoint_percent", checkpoints),
        **_percent("checkpoint_percent_one_worker", with_a_core),
    }
    save(options.out, "loop", result)


def _percent(name: str, rounds: list[list[float]]) -> dict[str, Any]:
    """The median of all checkpoints together, as those of one round are few, and the lowest and highest of a round's."""
    medians = [100 * statistics.median(shares) for shares in rounds]
    return {name: 100 * statistics.median(itertools.chain(*rounds)), f"{name}_spread": [min(medians), max(medians)]}


class Times(NamedTuple):
    """Of one rank: seconds for the steps, without the start and the steps that warm up, and what of it is logging."""

    loop_s: float
    logging_s: float = 0.0
    checkpoint_shares: Sequence[float] = ()
    """Of the time of the steps from one checkpoint to the next; as rank 0 sees it."""


def _measure(name: str, home: Path, steps: int, world: int) -> Times:
    """What the slower rank says of each."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.Queue()
        arguments = (name, str(home), folder, steps, world, answers)
        ranks = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        times = [answers.get(timeout=900) for _ in ranks]
        for rank in ranks:
            rank.join()
    return Times(*map(max, zip(*times, strict=True)))


def _rank(rank: int, name: str, home: str, folder: str, steps: int, world: int, answers: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    checkpoint = VARIANTS[name]
    if checkpoint is None:
        answers.put(Times(_by_hand(Path(home, "arrays"), rank, steps)))
    else:
        timer, checkpoints, times = LoggingTimer(), CheckpointTimer(), []
        for count in (WARM_STEPS, WARM_STEPS + steps):
            client, logged, began = Quiet(), timer.seconds, time.perf_counter()
            settings = {"batch_rows": BATCH, "workers": world, "max_steps": count, "checkpoint": checkpoint}
            job = train_job(ROWS, "loop_recipe.py:Net", Path(home, "penstock"), Path(folder, str(count)), **settings)
            run_rank(job, Group.current(_CPU), client)
            times.append((time.perf_counter() - began, timer.seconds - logged + client.seconds))
        (warm, logging_warm), (whole, logging_whole) = times
        shares = checkpoints.shares(WARM_STEPS) if name == SAVING and rank == 0 else []
        answers.put(Times(whole - warm, logging_whole - logging_warm, tuple(shares)))
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


def train_job(rows: Rows, recipe: str, data: Path, run: Path, **settings: Any) -> TrainJob:
    """A job that learns `rows` with a recipe of this folder; `settings` are fields of the train section."""
    made = manifest(rows, data)
    order = make_order(ShuffleSpec(seed=17), rows.rows)
    return TrainJob(
        run_storage=Storage(str(run)),
        data_storage=Storage(str(data)),
        manifest=made,
        order=order,
        spec=TrainSpec.model_validate({"recipe": recipe, "epochs": 1000, **settings}),
        seed=17,
        code=capture(recipe, Path(__file__).parent),
        attempt=1,
        pipeline="benchmark",
        identity={"data": made.content_digest, "order": order.fingerprint, "batch_rows": str(settings["batch_rows"])},
    )


if __name__ == "__main__":
    main()
