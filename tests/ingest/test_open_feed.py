"""The feed as other people's programs use it: by address, in plain torch, under DDP and Ray Train, and behind a DataLoader."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch

from penstock import FeedDataset, open_feed
from penstock.errors import DataError, ResumeError, SpecError
from penstock.ingest.manifest import DatasetManifest
from penstock.storage import Storage
from tests import ROOT
from tests.conformance.feed_cases import ROWS, write_dataset

BATCH = 64
STEPS = -(-ROWS // BATCH)


@pytest.fixture
def dataset(storage: Storage, manifest: DatasetManifest) -> str:
    manifest.write(storage)
    return storage.uri("datasets/k")


def rows_of(columns: dict[str, torch.Tensor]) -> list[int]:
    return [int(value) // 8 for value in columns["x"][:, 0].tolist()]  # x tells the rows apart


@pytest.mark.parametrize("kind", [str, Path])
def test_a_dataset_is_read_by_its_address(dataset: str, kind: type) -> None:
    feed = open_feed(kind(dataset), batch_rows=BATCH, seed=17)
    seen = [row for batch in feed.batches(0) for row in rows_of(batch.columns)]
    assert sorted(seen) == list(range(ROWS))
    assert seen != sorted(seen)


def test_unknown_and_missing_options_are_named() -> None:
    for options, said in (
        ({"batchsize": 3}, "unknown option 'batchsize'; did you mean 'batch_rows'"),
        ({"batch_rows": 4, "shufle": "global"}, "unknown option 'shufle'; did you mean 'shuffle'"),
        ({}, "batch_rows is missing"),
        ({"batch_rows": 4, "shuffle": "globl"}, "shuffle"),
    ):
        with pytest.raises(SpecError, match=said):
            open_feed("nowhere", **options)


def test_wrong_address_and_arguments_are_named(dataset: str) -> None:
    with pytest.raises(DataError, match="ends with /datasets/<key>"):
        open_feed("somewhere", batch_rows=BATCH)
    with pytest.raises(DataError, match="there is no dataset at") as caught:
        open_feed(dataset + "x", batch_rows=BATCH)
    assert "datasets of that storage: k" in caught.value.next_step
    with pytest.raises(DataError, match="no rows in split 'test'"):
        open_feed(dataset, "test", batch_rows=BATCH)
    with pytest.raises(SpecError, match="window_rows=1"):
        open_feed(dataset, batch_rows=BATCH, shuffle="windowed", window_rows=1)
    with pytest.raises(SpecError, match="rank=1 and world_size=None must be given together"):
        open_feed(dataset, batch_rows=BATCH, rank=1)
    with pytest.raises(SpecError, match="open_feed: no column 'pixels'; the dataset has"):
        open_feed(dataset, batch_rows=BATCH, columns=["pixels"])
    for wrong, words in (
        ({"batch_rows": 0}, "open_feed: batch_rows=0 must be a whole number of at least 1"),
        ({"batch_rows": 2.5}, "open_feed: batch_rows=2.5 must be a whole number"),
        ({"batch_rows": "64"}, "open_feed: batch_rows='64' must be a whole number"),
        ({"batch_rows": BATCH, "rank": 2, "world_size": 2}, "open_feed: rank=2 must be below world_size=2"),
        ({"batch_rows": BATCH, "augment": 3}, "open_feed: augment=3 is not a function"),
        ({"batch_rows": BATCH, "columns": "x"}, "open_feed: columns='x' is not a list of names"),
        ({"batch_rows": BATCH, "columns": []}, r"open_feed: columns=\[\] is not a list of names"),
    ):
        with pytest.raises(SpecError, match=words):
            open_feed(dataset, **wrong)
    with pytest.raises(ResumeError, match="saved state cannot be read"):
        open_feed(dataset, batch_rows=BATCH).load_state_dict(None)  # type: ignore[arg-type]


def test_damaged_shard_is_named_before_reading(
    dataset: str, manifest: DatasetManifest, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    assert open_feed(dataset, batch_rows=BATCH).num_rows == ROWS
    path = storage.local_path(manifest.shards[1].path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"1 of the dataset's {len(manifest.shards)} shards") as refused:
        open_feed(dataset, batch_rows=BATCH)
    assert refused.value.problems == (str(path),)
    assert open_feed(dataset, batch_rows=BATCH, verify=False).num_rows == ROWS


def test_dataloader_reads_epochs_and_resumes_inside_one(dataset: str) -> None:
    calm = FeedDataset(open_feed(dataset, batch_rows=BATCH, seed=3))
    loader = torch.utils.data.DataLoader(calm, batch_size=None, num_workers=0)
    assert len(calm) == STEPS
    whole = [rows_of(batch) for _ in range(3) for batch in loader]
    assert len(whole) == 3 * STEPS and whole[0] != whole[STEPS]

    stopped = FeedDataset(open_feed(dataset, batch_rows=BATCH, seed=3))
    seen: list[list[int]] = []
    for cut in (5, STEPS, STEPS + 2, 2 * STEPS + 7):
        while len(seen) < cut:
            for batch in stopped:
                seen.append(rows_of(batch))
                if len(seen) == cut:
                    break
        state = json.loads(json.dumps(stopped.state_dict()))
        stopped = FeedDataset(open_feed(dataset, batch_rows=BATCH, seed=3))
        stopped.load_state_dict(state)
    seen += [rows_of(batch) for batch in stopped]
    assert seen == whole
    with pytest.raises(ResumeError, match="seed of the shuffle"):
        FeedDataset(open_feed(dataset, batch_rows=BATCH, seed=4)).load_state_dict(state)


def test_epoch_left_early_is_followed_by_next(dataset: str) -> None:
    data = FeedDataset(open_feed(dataset, batch_rows=BATCH, seed=3))
    firsts = [rows_of(next(iter(data))) for _ in range(2)]
    assert firsts == [rows_of(next(data.feed.batches(epoch)).columns) for epoch in (0, 1)] and firsts[0] != firsts[1]


def test_max_batches_ends_epoch_also_for_state(dataset: str) -> None:
    def opened() -> FeedDataset:
        return FeedDataset(open_feed(dataset, batch_rows=BATCH, seed=3), max_batches=2)

    calm = opened()
    assert len(calm) == 2
    whole = [[rows_of(batch) for batch in calm] for _ in range(3)]
    assert [len(epoch) for epoch in whole] == [2, 2, 2]
    for cut in range(7):  # after so many batches, also none
        before, after = opened(), opened()
        epochs = (batch for _ in range(3) for batch in before)
        seen = [rows_of(batch) for batch in itertools.islice(epochs, cut)]
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        while len(seen) < 6:
            seen += [rows_of(batch) for batch in after]
        assert seen == [batch for epoch in whole for batch in epoch], cut
    with pytest.raises(SpecError, match="max_batches=0"):
        FeedDataset(open_feed(dataset, batch_rows=BATCH), max_batches=0)


def test_set_epoch_is_in_state_at_once(dataset: str) -> None:
    data = FeedDataset(open_feed(dataset, batch_rows=BATCH, seed=3))
    next(iter(data))
    data.set_epoch(5)
    state = data.state_dict()
    assert (state["epoch"], state["position"]) == (5, 0)


@pytest.mark.parametrize("options", [{}, {"batch_size": 32}])
def test_a_loader_that_would_stack_batches_is_refused(dataset: str, options: dict[str, int]) -> None:
    loader = torch.utils.data.DataLoader(FeedDataset(open_feed(dataset, batch_rows=BATCH)), **options)
    with pytest.raises(SpecError, match="the DataLoader would stack several") as caught:
        next(iter(loader))
    assert "batch_size=None" in caught.value.next_step


def test_iterating_or_pickling_a_feed_is_refused(dataset: str) -> None:
    feed = open_feed(dataset, batch_rows=BATCH)
    with pytest.raises(TypeError, match=r"for batch in feed\.batches\(epoch\)"):
        next(iter(feed))
    for what in (feed, FeedDataset(feed)):
        with pytest.raises(TypeError, match="call open_feed in the process that reads it"):
            pickle.dumps(what)


def test_a_dataloader_with_workers_is_refused(dataset: str) -> None:
    loader = torch.utils.data.DataLoader(FeedDataset(open_feed(dataset, batch_rows=BATCH)), batch_size=None, num_workers=1)
    with pytest.raises(SpecError, match="num_workers=0"):
        list(loader)


def test_manifest_of_another_version_is_refused(dataset: str) -> None:
    file = Path(dataset, "manifest.json")
    file.write_text(file.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(DataError, match="has version 1, and this penstock reads version 2") as caught:
        open_feed(dataset, batch_rows=BATCH)
    assert "run its pipeline again" in caught.value.next_step


def second_dataset(tmp_path: Path, rows: int = 100) -> str:
    storage = Storage(str(tmp_path / "second"))
    manifest = write_dataset(storage, tmp_path / "second-scratch", 2, rows=rows)
    manifest.model_copy(update={"key": "s"}).write(storage)
    return storage.uri("datasets/s")


def test_datasets_are_mixed_in_given_shares(dataset: str, tmp_path: Path) -> None:
    other = second_dataset(tmp_path)  # a tenth of the rows, three quarters of the draws
    opened = lambda **more: open_feed({dataset: 1, other: 3}, batch_rows=BATCH, seed=17, epoch_rows=800, **more)  # noqa: E731
    whole = [batch.row_ids.tolist() for batch in opened().batches(2)]
    drawn = [row for batch in whole for row in batch]
    assert len(drawn) == 800
    small = [row - ROWS for row in drawn if row >= ROWS]
    assert len(small) in (599, 600, 601)
    assert {small.count(row) for row in range(100)} == {6}
    assert max(drawn.count(row) for row in range(ROWS)) == 1
    ids = {row for epoch in range(8) for batch in opened().batches(epoch) for row in batch.row_ids.tolist()}
    assert len(ids) > 0.95 * (ROWS + 100), "every row gets its turn"
    for batch in opened().batches(2):  # the values are those of the dataset that the id lies in
        numbers = batch.row_ids - ROWS * (batch.row_ids >= ROWS)
        assert rows_of(batch.columns) == numbers.tolist()
    parts = [opened(rank=rank, world_size=2).batches(2, 5 * BATCH) for rank in range(2)]
    assert [[*a.row_ids.tolist(), *b.row_ids.tolist()] for a, b in zip(*parts, strict=True)] == whole[5:]
    state = opened().state_dict()
    with pytest.raises(ResumeError, match="fingerprint"):
        open_feed({dataset: 1, other: 2}, batch_rows=BATCH, seed=17, epoch_rows=800).load_state_dict(state)


def test_datasets_without_shares_are_mixed_by_their_rows(dataset: str, tmp_path: Path) -> None:
    both = [dataset, second_dataset(tmp_path)]
    rows = [row for batch in open_feed(both, batch_rows=BATCH, seed=17).batches(0) for row in batch.row_ids.tolist()]
    assert len(rows) == ROWS + 100
    assert abs(sum(row >= ROWS for row in rows) - 100) <= 1
    with pytest.raises(SpecError, match="last='Fill' must be one of keep, drop, fill"):
        open_feed(both, batch_rows=BATCH, last="Fill")
    with pytest.raises(SpecError, match="unknown option 'temperature'"):
        open_feed(both, batch_rows=BATCH, temperature=2)
    with pytest.raises(SpecError, match="finite"):
        open_feed({both[0]: float("inf"), both[1]: 1}, batch_rows=BATCH)


@pytest.mark.parametrize("shuffle", ["none", "windowed", "global"])
def test_the_last_batch_is_kept_dropped_or_filled(dataset: str, shuffle: Any) -> None:
    def read(last: Any, rank: int = 0, world_size: int = 1, start: int = 0) -> list[list[int]]:
        feed = open_feed(dataset, batch_rows=BATCH, shuffle=shuffle, lanes=1, last=last, rank=rank, world_size=world_size)
        return [batch.row_ids.tolist() for batch in feed.batches(1, start)]

    kept = read("keep")
    assert len(kept[-1]) == ROWS % BATCH
    assert read("drop") == kept[:-1]
    filled = read("fill")
    assert filled[:-1] == kept[:-1]
    assert filled[-1] == kept[-1] + kept[0][: BATCH - ROWS % BATCH]
    assert read("fill", start=14 * BATCH) == filled[14:]
    for last, whole in (("drop", kept[:-1]), ("fill", filled)):
        parts = [read(last, rank, 4) for rank in range(4)]
        assert {len(batch) for part in parts for batch in part} == {BATCH // 4}, "every rank has as many rows in every step"
        assert [[row for batch in step for row in batch] for step in zip(*parts, strict=True)] == whole
    feed = open_feed(dataset, batch_rows=BATCH, shuffle=shuffle, lanes=1, last="fill")
    assert feed.num_rows == 16 * BATCH
    with pytest.raises(ResumeError, match=r"rows of an epoch .*: 1024 in the checkpoint, 960 now"):
        open_feed(dataset, batch_rows=BATCH, shuffle=shuffle, lanes=1, last="drop").load_state_dict(feed.state_dict())


def test_only_batch_is_filled_or_refused(dataset: str) -> None:
    few = open_feed(dataset, batch_rows=3000, last="fill", shuffle="none")
    (batch,) = few.batches(0)
    assert batch.row_ids.tolist() == [row % ROWS for row in range(3000)]
    with pytest.raises(SpecError, match=f"{ROWS} rows do not fill one batch of 3000"):
        open_feed(dataset, batch_rows=3000, last="drop")


def test_unequal_datasets_are_refused(dataset: str, tmp_path: Path) -> None:
    other = second_dataset(tmp_path)
    with pytest.raises(SpecError, match="no dataset is named"):
        open_feed({}, batch_rows=BATCH)
    with pytest.raises(SpecError, match="epoch_rows=5 is for several"):
        open_feed(dataset, batch_rows=BATCH, epoch_rows=5)
    with pytest.raises(SpecError, match=r"^open_feed: shuffle='random': Input should be 'none', 'windowed' or 'global'"):
        open_feed(dataset, batch_rows=BATCH, shuffle="random")
    with pytest.raises(SpecError, match=r"so it needs shuffle=global, not windowed\n") as caught:
        open_feed(dataset, batch_rows=BATCH, shuffle="windowed", sample={"balance": "label"})
    assert "help(penstock.FeedOptions)" in caught.value.next_step
    with pytest.raises(SpecError, match="no column 'label'") as caught:
        open_feed(dataset, batch_rows=BATCH, columns=["x"], sample={"balance": "label"})
    assert "open_feed's `columns`" in caught.value.next_step
    with pytest.raises(SpecError, match="cannot be mixed with shuffle='none'"):
        open_feed({dataset: 1, other: 1}, batch_rows=BATCH, shuffle="none")
    with pytest.raises(SpecError, match=rf"^open_feed: 0 beside {other!r} must be a number above 0"):
        open_feed({dataset: 1, other: 0}, batch_rows=BATCH)
    with pytest.raises(DataError, match="no rows in split 'test'"):
        open_feed({dataset: 1, other: 1}, "test", batch_rows=BATCH)
    file = tmp_path / "second" / "datasets" / "s" / "manifest.json"
    file.write_text(file.read_text().replace('"uint8"', '"int8"'))
    with pytest.raises(DataError, match=r"differ in their columns: .*image: uint8\[2, 3\].* and .*image: int8\[2, 3\]"):
        open_feed({dataset: 1, other: 1}, batch_rows=BATCH)
    assert open_feed({dataset: 1, other: 1}, batch_rows=BATCH, columns=["x"]).num_rows == ROWS + 100


class Recorder(pytorch_lightning.LightningModule):
    """A model that remembers the rows of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(5, 7)
        self.steps: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
        self.steps.append(rows_of(batch))
        return torch.nn.functional.cross_entropy(self.net(batch["x"] / 8000), batch["label"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def example(title: str) -> str:
    """The first Python block of a section of docs/feed.md."""
    section = (ROOT / "docs" / "feed.md").read_text().split(f"## {title}")[1]
    return section.split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize("cut", [5, STEPS, STEPS + 3])
@pytest.mark.filterwarnings(
    "ignore"
)  # Lightning's advice on workers and loggers, and torchdata's use of what torch has deprecated
def test_the_example_for_lightning_continues_from_its_checkpoint(dataset: str, tmp_path: Path, cut: int) -> None:
    def fitted(more: str = "", **settings: Any) -> Recorder:
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=tmp_path,
            **settings,
        )
        names = {
            "dataset": dataset,
            "trainer": trainer,
            "model": Recorder(),
            "open_feed": open_feed,
            "FeedDataset": FeedDataset,
        }
        exec(example("Where a DataLoader").replace("(model, loader)", f"(model, loader{more})"), names)
        return names["model"]  # type: ignore[return-value]

    whole = fitted(max_epochs=3).steps
    assert len(whole) == 3 * STEPS
    saving = pytorch_lightning.callbacks.ModelCheckpoint(tmp_path, filename="cut", every_n_train_steps=cut, save_top_k=-1)
    begun = fitted(max_steps=cut, callbacks=[saving]).steps
    rest = fitted(f", ckpt_path={str(tmp_path / 'cut.ckpt')!r}", max_epochs=3).steps
    assert begun + rest == whole


RAY_TRAIN = """
import json, sys, ray, ray.train
from pathlib import Path
from ray.train.torch import TorchTrainer
from penstock import open_feed
CODE
dataset, out = sys.argv[1:]
ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
TorchTrainer(
    train_loop_per_worker,
    train_loop_config={"dataset": dataset, "out": out},
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(storage_path=out + "/ray"),
).fit()
"""
WRITES = "        Path(config['out'], str(context.get_world_rank())).open('a').write(f'{batch.row_ids.tolist()}\\n')"


@pytest.mark.drill
def test_the_example_for_ray_train_shares_every_row_out_once(dataset: str, tmp_path: Path) -> None:
    code = RAY_TRAIN.replace("CODE", example("With Ray Train").replace("        ...", WRITES))
    command = [sys.executable, "-c", code, dataset, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [[json.loads(line) for line in (tmp_path / str(rank)).read_text().splitlines()] for rank in range(2)]
    assert {len(part) for part in parts} == {STEPS}
    assert sorted(row for part in parts for batch in part for row in batch) == list(range(ROWS))


DDP = """
import json, sys, torch, torch.distributed
from penstock import open_feed
dataset = sys.argv[1]
CODE
rows = [int(v) // 8 for batch in feed.batches(0) for v in batch.columns["x"][:, 0].tolist()]
print(json.dumps([rows, [p.sum().item() for p in model.parameters()]]))
"""


@pytest.mark.drill
@pytest.mark.slow
def test_the_example_for_ddp_shares_every_row_out_once(dataset: str) -> None:
    code = example("With torch DDP")
    port = str(29500 + os.getpid() % 1000)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DDP.replace("CODE", code), dataset],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    answers = [json.loads(rank.communicate(timeout=240)[0]) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert sorted(answers[0][0] + answers[1][0]) == list(range(ROWS))
    assert answers[0][1] == answers[1][1], "both ranks hold the same weights"
