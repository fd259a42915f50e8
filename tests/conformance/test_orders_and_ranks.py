"""Every order, for any number of ranks: the same rows in each step, from any position, over resumes and into the next epoch.

Each order is read by 1, 2, 3, 4, 7 and 64 ranks: all of two epochs, from the middle and from an epoch's end; and once by all of
these numbers in turn, each continuing from the state that the one before has saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import FeedDataset, open_feed
from penstock.ingest.feed.cached import CachedFeed
from penstock.ingest.manifest import ShardTable
from penstock.ingest.phases import fetched_so_far
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.training.checkpoint.exactness import BIT_EXACT
from penstock.training.checkpoint.manifest import CheckpointFacts
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.job import TrainJob
from penstock.training.on_ray.start import Start
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues
from penstock.training.ranks import Group
from penstock.training.session.session import Session
from penstock.training.spec import TrainSpec
from penstock.training.state import TrainState
from penstock.usercode.capture import capture

from .feed_cases import write_dataset

RANKS = (1, 2, 3, 4, 7, 64)
ROWS, BATCH = 331, 64

ORDERS: dict[str, dict[str, Any]] = {
    "lanes": {},
    "lanes-7": {"lanes": 7},
    "lanes-more-than-shards": {"lanes": 16},
    "one-lane": {"lanes": 1},
    "windows-of-runs": {"shuffle": "windowed", "window_rows": 200},
    "windows-of-shards": {"shuffle": "windowed", "window_of": "shards", "window_rows": 200},
    "stored": {"shuffle": "none"},
    "balanced": {"sample": {"balance": "label"}},
    "weighted": {"sample": {"weights": "label", "rows": 200}},
    "curriculum": {"sample": {"easiest_first": "label"}},
    "steps-by-length": {"by_length": {"column": "tokens", "pool_batches": 5}},
    "steps-by-entries": {"by_length": {"column": "tokens", "pool_batches": 5, "batch_entries": 100}},
    "mixture": {},
    "mixture-by-shares": {"epoch_rows": 300},
    "lanes-drop": {"last": "drop"},
    "lanes-fill": {"last": "fill"},
    "one-lane-drop": {"last": "drop", "lanes": 1},
    "one-lane-fill": {"last": "fill", "lanes": 1},
    "balanced-fill": {"last": "fill", "sample": {"balance": "label"}},
}
"""Name -> options of `open_feed`, on 11 shards. `last` is `keep` unless it is named."""

BY_TURNS = pytest.mark.drill
EACH_ORDER = [
    name if name in ("lanes", "windows-of-shards", "steps-by-entries", "mixture") else pytest.param(name, marks=BY_TURNS)
    for name in ORDERS
]
IN_LANES = {name for name in ORDERS if name.startswith(("lanes", "windows"))}


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("orders")
    storage = Storage(str(folder / "storage"))
    manifest = write_dataset(storage, folder / "scratch", 11, ROWS, lists=True)
    for key in ("one", "other"):
        manifest.model_copy(update={"key": key}).write(storage)
    return [storage.uri(f"datasets/{key}") for key in ("one", "other")]


def opened(addresses: Sequence[str], order: str, ranks: int) -> list[CachedFeed]:
    one, other = addresses
    dataset: Any = {"mixture": [one, other], "mixture-by-shares": {one: 3, other: 1}}.get(order, one)
    options = {"batch_rows": BATCH, "seed": 5, "verify": False, "prefetch": 0, "columns": ["x", "label", "tokens"]}
    options |= ORDERS[order]
    return [open_feed(dataset, rank=rank, world_size=ranks, **options) for rank in range(ranks)]


def steps_of(feeds: Sequence[CachedFeed], epoch: int, start: int = 0, count: int | None = None) -> list[list[int]]:
    """Rows of each step over all ranks, sorted; the ranks agree on every step's place."""
    found = []
    for parts in zip(*(islice(feed.batches(epoch, start), count) for feed in feeds), strict=True):
        assert len({(part.position, part.global_rows) for part in parts}) == 1
        assert sum(part.rows for part in parts) == parts[0].global_rows
        found.append(sorted(row for part in parts for row in part.row_ids.tolist()))
    return found


@pytest.mark.parametrize("order", EACH_ORDER)
def test_any_number_of_ranks_reads_the_same_steps(addresses: list[str], order: str) -> None:
    (alone,) = opened(addresses, order, 1)
    whole = [steps_of([alone], epoch) for epoch in (0, 1)]
    assert (whole[0] != whole[1]) == (order != "stored")
    assert (alone.order.lanes > 1) == (order in IN_LANES), order
    ends = [batch.position for batch in alone.batches(1)]
    middle = len(ends) // 2
    for ranks in RANKS[1:]:
        feeds = opened(addresses, order, ranks)
        assert steps_of(feeds, 0, count=2) == whole[0][:2], ranks
        assert steps_of(feeds, 1, ends[middle - 1]) == whole[1][middle:], ranks
        assert steps_of(feeds, 1, ends[-1]) == [], ranks


@pytest.mark.parametrize("order", EACH_ORDER)
def test_each_number_of_ranks_continues_the_one_before(addresses: list[str], order: str) -> None:
    (alone,) = opened(addresses, order, 1)
    whole = [steps_of([alone], epoch) for epoch in (0, 1)]
    state, seen = opened(addresses, order, 1)[0].state_dict(), list[list[list[int]]]([[], []])
    cuts = [0.2, 0.5, 0.5, 1.0, 0.3, 1.0]
    for ranks, share in zip(RANKS, cuts, strict=True):  # two stops within an epoch, two at its end, one resumed at once
        feeds = opened(addresses, order, ranks)
        epoch, position = feeds[0].load_state_dict(json.loads(json.dumps(state)))
        epoch, position = (epoch + 1, 0) if position == feeds[0].num_rows else (epoch, position)
        count = max(0, round(share * len(whole[epoch])) - len(seen[epoch]))
        seen[epoch] += steps_of(feeds, epoch, position, count)
        if count:
            states = [feed.state_dict() for feed in feeds]
            assert all(each == states[0] for each in states), "every rank saves the same"
            state = states[-1]
    assert seen == whole


@pytest.mark.parametrize(
    "order",
    ["lanes", *(pytest.param(name, marks=BY_TURNS) for name in ("lanes-fill", "balanced", "mixture", "windows-of-shards"))],
)
def test_feed_dataset_of_any_number_of_ranks_continues(addresses: list[str], order: str) -> None:
    def rows(steps: Iterator[tuple[dict[str, torch.Tensor], ...]]) -> list[list[int]]:
        return [sorted(int(x) // 8 for part in step for x in part["x"][:, 0].tolist()) for step in steps]

    def sets(ranks: int) -> list[FeedDataset]:
        return [FeedDataset(feed) for feed in opened(addresses, order, ranks)]

    (alone,) = sets(1)
    whole = [rows(zip(alone, strict=True)) for _ in range(2)]
    state, seen = sets(1)[0].state_dict(), list[list[int]]([])
    for ranks, upto in zip(RANKS, (2, 4, len(alone), len(alone) + 2, len(alone) + 4, 2 * len(alone)), strict=True):
        data = sets(ranks)
        for each in data:
            each.load_state_dict(json.loads(json.dumps(state)))
        seen += rows(islice(zip(*data, strict=True), upto - len(seen)))
        state = data[-1].state_dict()
    assert seen == [*whole[0], *whole[1]]


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    return make_job(tmp_path)


def make_job(tmp_path: Path, *, lists: bool = False) -> TrainJob:
    """Training and validation on the same rows, in files behind a URL, so that they count as remote."""
    storage = Storage(str(tmp_path / "storage"))
    manifest = write_dataset(storage, tmp_path / "scratch", 40, ROWS, lists=lists)
    other = tuple(shard.model_copy(update={"split": "validation"}) for shard in manifest.shards)
    table = ShardTable.of([*manifest.shards, *other])
    both = manifest.model_copy(update={"table": table, "rows": {"train": ROWS, "validation": ROWS}})
    here = Path(__file__).parents[1] / "training"
    return TrainJob(
        run_storage=Storage(str(tmp_path / "run")),
        data_storage=Storage(f"local://{storage.root}"),
        manifest=both,
        order=make_order(ShuffleSpec(seed=5), ROWS, manifest.shards.rows, BATCH),
        spec=TrainSpec(recipe="recipes.py:Digits", batch_rows=BATCH),
        seed=5,
        code=capture("recipes.py:Digits", here),
        attempt=1,
        pipeline="orders",
    )


CPU = torch.device("cpu")


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, pytest.param(64, marks=BY_TURNS)])
def test_ranks_validate_a_stretch_each_and_every_row_once(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    whole = job.manifest.table.size_bytes["validation"]
    parts, fetched = [], []
    for rank in range(ranks):
        monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / f"node{rank}"))
        feed, before = open_job_feed(job, "validation", rank, ranks, CPU), fetched_so_far().bytes
        for number in (0, 1):
            parts.append([*feed.batches(0)])
            fetched.append((number, fetched_so_far().bytes - before))
            before = fetched_so_far().bytes
    first = parts[::2]
    assert [[batch.row_ids.tolist() for batch in part] for part in first] == [
        [batch.row_ids.tolist() for batch in part] for part in parts[1::2]
    ]
    own = [[row for batch in part for row in batch.row_ids.tolist()] for part in first]
    assert all(rows == [*range(rows[0], rows[-1] + 1)] for rows in own), "in the order in which they are stored"
    assert [row for rows in own for row in rows] == [*range(ROWS)]
    assert len({len(part) for part in first}) == 1 and max(b.rows for part in first for b in part) <= -(-BATCH // ranks)
    assert sum(size for number, size in fetched if number == 1) == 0
    most = job.manifest.shards.size_bytes.max()
    assert sum(size for _, size in fetched) <= whole + (ranks - 1) * most, "a shard more at each cut"


def test_steps_by_length_validate_slices_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    spec = ShuffleSpec.model_validate({"by_length": ORDERS["steps-by-entries"]["by_length"]})
    by_length = replace(make_job(tmp_path, lists=True), order=make_order(spec, ROWS))
    assert open_job_feed(by_length, "validation", 0, 2, CPU).order.lanes == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [*RANKS[:-1], pytest.param(64, marks=BY_TURNS)])
def test_shards_of_a_loop_hold_the_steps_of_the_order(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    own = -(-BATCH // ranks)  # rows of a rank's batch; a global one has so many from each
    rows = replace(job, spec=job.spec.model_copy(update={"batch_rows": own * ranks}))
    whole = [
        [sorted(batch.row_ids.tolist()) for batch in open_job_feed(rows, "train", 0, 1, CPU).batches(epoch)] for epoch in (0, 1)
    ]
    fewest = [step for step in whole[0] if len(step) >= ranks]

    def walked(split: str, state: TrainState, count: int | None = None) -> list[list[int]]:
        facts = CheckpointFacts.at(
            state, world_size=ranks, identity={}, settings=job.settings, environment={}, exactness=BIT_EXACT
        )
        groups = [Group(rank, ranks, CPU) for rank in range(ranks)]
        starts = [Start(job, group, job_checkpoints(job), None, (), facts, False) for group in groups]
        sessions = [Session(start, OwnValues(None, "train"), None, None) for start in starts]
        shards = [session.shard(split) for session in sessions]
        walks = [islice(shard.iter_torch_batches(batch_size=own), count) for shard in shards]
        return [sorted(int(x) // 8 for part in step for x in part["x"][:, 0].tolist()) for step in zip(*walks, strict=True)]

    assert walked("train", TrainState()) == fewest
    for done in (2, 4):  # resumed twice
        assert walked("train", TrainState(done, 0, done * own * ranks)) == fewest[done:]
    assert walked("train", TrainState(len(whole[0]), 1, 0), 4) == whole[1][:4]
    seen = [row for step in walked("validation", TrainState()) for row in step]
    assert len(seen) == len(set(seen)) > ROWS - ranks
