"""Does a function written for Ray Train run with no edit: its rows, reports and checkpoints, also after a kill?"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch
import yaml
from ray.data.collate_fn import ArrowBatchCollateFn, PandasBatchCollateFn
from ray.train.v2.api.context import LocalTrainContext
from sklearn.datasets import load_digits

from penstock.errors import SpecError, TrainingError
from penstock.flows.history.report import throughput_sentence
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.training.checkpoint.exactness import BIT_EXACT
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.manifest import Checkpoint, CheckpointFacts
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.evaluation.evaluate import evaluate
from penstock.training.events import Point, Printed, Resumed
from penstock.training.frameworks.loops.steps import train_epochs
from penstock.training.frameworks.ray_train.framework import RAY_TRAIN, run_loop_rank
from penstock.training.frameworks.ray_train.old_names import refuse_old_names
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, load_model
from penstock.training.on_ray.start import RankResult, Start
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues
from penstock.training.ranks import Group
from penstock.training.session.session import Session
from penstock.training.spec import TrainSpec
from penstock.training.state import TrainState
from penstock.usercode.capture import capture
from tests import ROOT
from tests.ingest.preparing import Source
from tests.runs.forked import fork_workers_from_here
from tests.training.digits import CPU, ROWS, ListClient, make_job
from tests.training.on_ray.test_trainer import Watcher
from tests.training.ranks import run_ranks

PARAMS = {"lr": 0.02, "epochs": 3, "batch_size": 32}


def loop_job(
    folder: Path, function: str = "train_func", run: str = "run", attempt: int = 1, file: str = "loops.py", **more: Any
) -> TrainJob:
    """A job whose loop is a function of `file`; `more` are its params and fields of the train section."""
    fields = {name: more.pop(name) for name in [*more] if name in TrainSpec.model_fields}
    spec = TrainSpec(loop=f"{file}:{function}", params={**PARAMS, **more}, **fields)
    code = capture(spec.recipe, Path(__file__).parent, spec.params)
    return replace(make_job(folder, run=run, attempt=attempt), spec=spec, code=code)


def newest(folder: Path, run: str = "run") -> Checkpoint:
    checkpoint, _ = CheckpointStore(Storage(str(folder / run))).newest_valid()
    assert checkpoint is not None
    return checkpoint


def session_of(job: TrainJob, rank: int, state: TrainState | None = None) -> Session:
    """One of two ranks', at the beginning or at `state`."""
    facts = CheckpointFacts.at(
        state or TrainState(), world_size=2, identity={}, settings=job.settings, environment={}, exactness=BIT_EXACT
    )
    start = Start(job, Group(rank, 2, CPU), job_checkpoints(job), None, (), facts, False)
    return Session(start, OwnValues(None, "train"), None, None)


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Ray's context be that of its local mode: this process is not a worker of Ray Train."""
    context = LocalTrainContext(experiment_name="loop")
    monkeypatch.setattr(Session, "get_context", lambda self: context)
    monkeypatch.setattr("ray.train.torch.train_loop_utils.get_device", lambda: CPU)
    yield
    ray.shutdown()


def run_alone(job: TrainJob, client: ListClient | None = None) -> RankResult:
    return run_loop_rank(job, Group(0, 1, CPU), client or ListClient())


def error_of(group: Group, job: TrainJob) -> str:
    context = LocalTrainContext(experiment_name="loop")
    try:
        with mock.patch.object(Session, "get_context", lambda self: context):
            run_loop_rank(job, group, ListClient())
    except TrainingError as error:
        return error.message
    except RuntimeError as error:  # of a collective with a rank that has left
        return str(error)
    return ""


def test_report_before_a_collective_of_others_is_named(tmp_path: Path) -> None:
    errors = run_ranks(error_of, 2, loop_job(tmp_path, "reports_and_reduces", stall_s=1), timeout_s=60)
    assert "ray.train.report was not called by every worker: rank 0 reports; rank 1 goes on" in errors


def test_report_of_one_worker_alone_is_named(tmp_path: Path) -> None:
    errors = run_ranks(error_of, 2, loop_job(tmp_path, "reports_alone"))
    assert errors == ["ray.train.report was not called by every worker: rank 0 reports; rank 1 has ended"] * 2


@pytest.mark.usefixtures("without_ray")
def test_loop_killed_in_mid_epoch_continues_to_same_bits(tmp_path: Path) -> None:
    whole = run_alone(loop_job(tmp_path, run="whole", every=4))
    with pytest.raises(TrainingError, match=r"loops\.py:\d+ in train_func"):
        run_alone(loop_job(tmp_path, run="parts", every=4, dies_after=19))
    assert newest(tmp_path, "parts").state.step == 16 and newest(tmp_path, "parts").state.position == 5 * 32
    parts = run_alone(loop_job(tmp_path, run="parts", attempt=2, every=4))
    assert whole.status == parts.status == "finished" and parts.resumed_from_step == 16
    assert whole.exactness == "same-order: the state that train_func restores is not verified"
    assert parts.exactness == f"{whole.exactness}, train.params (dies_after)"
    one, two = newest(tmp_path, "whole").manifest, newest(tmp_path, "parts").manifest
    assert (one.step, one.epoch, one.position) == (two.step, two.epoch, two.position) == (33, 3, 0)
    assert one.weights_digest == two.weights_digest and one.metrics == two.metrics
    points = [p for p in read_journal(Storage(str(tmp_path / "whole")), 99) if "val/accuracy" in p.values]
    assert [p.step for p in points] == [11, 22, 33] and points[-1].values["val/accuracy"] > 0.15
    waits = [(p.values["train/data_wait_s"], p.values["train/step_s"]) for p in points]
    assert all(0 < wait_s < step_s for wait_s, step_s in waits) and "waited for rows" in throughput_sentence(points)

    job = loop_job(tmp_path, run="whole")
    model = load_model(
        ModelSpec(code=job.code, params=job.spec.params, feed_schema=job.manifest.feed_schema, loader=RAY_TRAIN.loader),
        newest(tmp_path, "whole").storage,
    )
    assert model.predict({"image": torch.zeros(3, 8, 8)}, 3).shape == (3, 10)


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    ("shape", "death", "step"),
    [
        ({"every": 11}, {"dies_before_validation_of": 1}, 12),  # reported after an epoch's last batch, in the loop over them
        ({"every": 5, "drop_last": True}, {"dies_before_validation_of": 1}, 15),
        ({"every": 5, "drop_last": True}, {"dies_after": 13}, 11),  # from the end of an epoch whose last rows are left out
        ({"every": 4, "once": True}, {"dies_after": 15}, 12),  # of a loader made once, in the second epoch
        ({"every": 4, "keeps": True}, {"dies_after": 15}, 12),  # of rows that it keeps in memory, in the second epoch
        ({"every": 4, "looks": True}, {"dies_after": 10}, 8),  # and it looks at a batch before its first epoch
        ({"every": 4, "batches_an_epoch": 6}, {"dies_after": 7}, 7),  # from the end of one that the loop left
    ],
)
def test_loop_resumed_at_epoch_end_starts_next_epoch(
    tmp_path: Path, shape: dict[str, Any], death: dict[str, Any], step: int
) -> None:
    whole = run_alone(loop_job(tmp_path, run="whole", **shape))
    with pytest.raises(TrainingError, match="killed"):
        run_alone(loop_job(tmp_path, run="parts", **shape, **death))
    parts = run_alone(loop_job(tmp_path, run="parts", attempt=2, **shape))
    assert parts.resumed_from_step == step
    assert (whole.state.epoch, whole.state.position) == (parts.state.epoch, parts.state.position) == (3, 0)
    assert newest(tmp_path, "parts").manifest.weights_digest == newest(tmp_path, "whole").manifest.weights_digest


@pytest.mark.usefixtures("without_ray")
def test_loop_failing_on_empty_pass_gets_explanation(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="killed"):
        run_alone(loop_job(tmp_path, every=11, dies_after=11))
    with pytest.raises(TrainingError, match=r"UnboundLocalError(?s:.)*after its last batch(?s:.)*--fresh"):
        run_alone(loop_job(tmp_path, attempt=2, every=11))


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(("function", "dies_after", "step"), [("careful", 5, 4), ("own_rows", 2, 1)])
def test_loop_restoring_all_state_ends_with_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, dies_after: int, step: int
) -> None:
    jobs = [loop_job(tmp_path, function, run, number) for run, number in (("whole", 1), ("parts", 1), ("parts", 2))]
    whole = run_alone(jobs[0])
    monkeypatch.setenv("DIES_AFTER", str(dies_after))
    with pytest.raises(TrainingError, match="killed behind a step"):
        run_alone(jobs[1])
    monkeypatch.delenv("DIES_AFTER")
    client = ListClient()
    parts = run_alone(jobs[2], client)
    (resumed,) = (event for event in client.events if isinstance(event, Resumed))
    assert parts.resumed_from_step == step
    assert newest(tmp_path, "whole").manifest.weights_digest == newest(tmp_path, "parts").manifest.weights_digest
    manifest = newest(tmp_path, "parts").manifest
    unverified = f"same-order: the state that {function} restores is not verified"
    assert {whole.exactness, parts.exactness, manifest.exactness, resumed.exactness} == {unverified}
    ended = run_alone(replace(jobs[2], attempt=3))
    assert (ended.state, ended.exactness) == (parts.state, parts.exactness), "nothing was left to do"


@pytest.mark.usefixtures("without_ray")
def test_nondeterministic_op_of_loop_is_named(tmp_path: Path) -> None:
    assert run_alone(loop_job(tmp_path, "careful", chance=True)).exactness.endswith(
        "is not verified, put_ is not deterministic"
    )


@pytest.mark.usefixtures("without_ray")
def test_vit_with_two_optimizers_resumes_mid_epoch_to_same_bits(tmp_path: Path) -> None:
    run_alone(loop_job(tmp_path, "vision_transformer", run="whole"))
    with pytest.raises(TrainingError, match="killed in the middle"):
        run_alone(loop_job(tmp_path, "vision_transformer", run="parts", dies_after=6))
    parts = run_alone(loop_job(tmp_path, "vision_transformer", run="parts", attempt=2))
    assert parts.resumed_from_step in (5, 6) and parts.state.step == 11
    assert newest(tmp_path, "parts").manifest.weights_digest == newest(tmp_path, "whole").manifest.weights_digest


@pytest.mark.usefixtures("without_ray")
def test_resnet_learns_grey_images_from_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files as a user has them, prepared by the pipeline's own stages; the loop asks for no other shape or type."""
    images, labels = load_digits(n_class=2, return_X_y=True)
    pixels = np.pad(np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    columns = {"image": tensor_array(pixels.astype(np.uint8)), "label": labels}
    parts = {f"train/part-{part}.parquet": pa.table(columns).slice(part * 200, 200) for part in range(2)}
    source = Source.of(tmp_path, parts, label="label", validation={"fraction": 0.25})
    manifest = source.materialize()
    job = loop_job(tmp_path)
    job = replace(job, data_storage=source.storage, manifest=manifest, order=make_order(ShuffleSpec(), manifest.rows["train"]))
    assert run_alone(job).status == "finished"
    assert manifest.feed_schema["image"].shape == (28, 28) and manifest.feed_schema["image"].dtype == "uint8"
    losses = [p.values["loss"] for p in read_journal(job.run_storage, 999) if "val/accuracy" in p.values]
    assert len(losses) == 3 and losses[-1] < 0.3, losses  # of 10 classes, from 2.3
    assert f"epoch 2 rows {manifest.rows['validation']}" in capsys.readouterr().out


def test_logged_values_join_report_and_best_checkpoint_stays(tmp_path: Path) -> None:
    client, more = ListClient(), {"scores": [3, 9, 1, 5, 2]}
    job = loop_job(
        tmp_path, "logs", file="logging_loop.py", checkpoint={"keep": 2, "best": {"metric": "score", "mode": "max"}}, **more
    )
    run_alone(job, client)
    wanted = {number + 1: {"score": score, "train/from_penstock": number + 1} for number, score in enumerate(more["scores"])}
    for points in ([each for each in client.events if isinstance(each, Point)], read_journal(job.run_storage, 99)):
        assert {each.step: {k: v for k, v in each.values.items() if not k.startswith("report/")} for each in points} == wanted
        assert [each.values["report/iteration"] for each in points] == [1, 2, 3, 4, 5]
    store = job_checkpoints(job)
    assert [(each.state.step, each.manifest.metrics["score"]) for each in store.committed()] == [(5, 2), (4, 5), (2, 9)]
    best = store.best()
    assert best is not None and best.state.step == 2


BEFORE_THE_PAGE = """
import tempfile

import ray.train
import ray.train.torch
import torch


class Net(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))


"""


@pytest.mark.usefixtures("without_ray")
def test_loop_of_page_trains_and_its_functions_load_model(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ray-train.md").read_text(encoding="utf-8")
    train_func, model_of_it = (part.split("```")[0] for part in page.split("```python\n")[1:])
    (tmp_path / "loop.py").write_text(f"{BEFORE_THE_PAGE}{train_func}\n\n{model_of_it}")
    spec = TrainSpec.model_validate(yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])["train"])
    job = replace(make_job(tmp_path), spec=spec, code=capture(spec.recipe, tmp_path, spec.params))
    RAY_TRAIN.check(job.code, spec)
    ended = run_alone(job)
    assert (ended.status, ended.state.epoch, ended.state.step) == ("finished", 5, 30)
    loader = ModelSpec(code=job.code, params=spec.params, feed_schema=job.manifest.feed_schema, loader=RAY_TRAIN.loader)
    found = evaluate(job, load_model(loader, newest(tmp_path).storage), splits=["validation"])
    assert found.metrics["val/loss"] < 2.25 and found.metrics["val/accuracy"] > 0.2, "a guess is right in a tenth"


@pytest.mark.usefixtures("without_ray")
def test_loop_over_own_items_needs_no_rows_and_no_config(tmp_path: Path) -> None:
    result = run_alone(loop_job(tmp_path, "linear_on_items"))
    assert result.status == "finished" and newest(tmp_path).state.step == 3
    losses = [p.values["mse"] for p in read_journal(Storage(str(tmp_path / "run")), 9)]
    assert len(losses) == 3 and losses[0] > losses[2]


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"asks": "to_tf", "arguments": {"feature_columns": "image", "label_columns": "label"}}, "tensorflow"),
        ({"asks": "map"}, "has no map()"),
        ({"asks": "iter_epochs"}, "has no iter_epochs"),
        ({"asks": "iter_batches", "arguments": {"local_shuffle_buffer_size": 9}}, "local_shuffle_buffer_size=9"),
    ],
)
def test_shard_has_rays_methods_and_refuses_others_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], problem: str
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises((SpecError, TrainingError), match=re.escape(problem)):
        run_alone(loop_job(tmp_path, "every_format", **more))
    rows = ROWS["train"]
    wanted = f"forms ['dict', 'DataFrame', 'Table'] True 5 {rows} {rows // 50 * 50} (8, 8) {rows} ['image', 'label']"
    assert wanted in capsys.readouterr().out


def test_shard_rows_follow_feed_order_each_rank_its_share(tmp_path: Path) -> None:
    job = loop_job(tmp_path)
    rows = replace(job, spec=job.spec.model_copy(update={"batch_rows": 100}))
    epochs = []
    for rank in (0, 1):
        shard, feed = session_of(job, rank).shard("train"), open_job_feed(rows, "train", rank, 2, CPU)
        for epoch in (0, 1):
            given = [batch["image"] for batch in shard.iter_torch_batches(batch_size=50)]
            wanted = [batch.columns["image"] for batch in feed.batches(epoch)]
            assert len(given) == len(wanted) == 4 and all(map(torch.equal, given, wanted))
            epochs.append(torch.cat(given))
    assert shard.stats() == "train: 333 rows, prepared by penstock, shared by 2 workers"
    both = [session_of(job, rank).shard("test") for rank in (0, 1)]
    assert sum(len(batch["label"]) for each in both for batch in each.iter_batches()) == both[0].count() == ROWS["test"]
    with pytest.raises(SpecError, match=r"get_dataset_shard\('held'\): the pipeline has 'train', 'validation', 'test'"):
        session_of(job, 0).shard("held")
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0][:160], epochs[2][:160])


def test_iterable_starts_next_epoch_at_each_iter(tmp_path: Path) -> None:
    job = loop_job(tmp_path)
    shard = session_of(job, 0).shard("train")
    wanted = [[batch["image"] for batch in shard.iter_torch_batches(batch_size=50)] for _ in range(3)]
    assert not torch.equal(torch.cat(wanted[0]), torch.cat(wanted[1]))
    once = session_of(job, 0).shard("train").iter_torch_batches(batch_size=50)
    for epoch in wanted:
        given = [batch["image"] for batch in once]
        assert len(given) == len(epoch) and all(map(torch.equal, given, epoch))

    arrays = session_of(job, 0).shard("train").iter_batches(batch_size=50)
    assert torch.equal(torch.as_tensor(next(iter(arrays))["image"]), wanted[0][0]), "only looked at"
    for batch, expected in zip(arrays, wanted[0][:2], strict=False):
        assert torch.equal(torch.as_tensor(batch["image"]), expected)
    assert torch.equal(torch.as_tensor(next(iter(arrays))["image"]), wanted[1][0]), "the pass before was left early"

    whole = loop_job(tmp_path, datasets={"train": "whole"})
    every, rows = session_of(whole, 0).shard("train"), session_of(whole, 0).shard("train").iterator().iter_rows()
    for _ in range(2):
        epoch_images = torch.cat([batch["image"] for batch in every.iter_torch_batches(batch_size=50)])
        assert torch.equal(torch.stack([torch.as_tensor(row["image"]) for row in rows]), epoch_images)


def test_resumed_iterable_gives_rest_of_epoch_first(tmp_path: Path) -> None:
    job = loop_job(tmp_path)
    shard = session_of(job, 0).shard("train")
    first, second = ([batch["image"] for batch in shard.iter_torch_batches(batch_size=50)] for _ in range(2))
    once = session_of(job, 0, TrainState(2, 0, 200)).shard("train").iter_torch_batches(batch_size=50)
    for expected in (first[2:], second):
        given = [batch["image"] for batch in once]
        assert len(given) == len(expected) and all(map(torch.equal, given, expected))


def test_two_walks_at_once_are_refused(tmp_path: Path) -> None:
    for walks in (
        lambda loader: [*zip(loader, loader, strict=True)],
        lambda loader: [(one, two) for one in loader for two in loader],
    ):
        loader = session_of(loop_job(tmp_path), 0).shard("train").iter_batches(batch_size=50)
        with pytest.raises(SpecError, match=r"'train': two passes over its rows at once"):
            walks(loader)
    loader = session_of(loop_job(tmp_path), 0).shard("validation").iter_batches(batch_size=50)
    pairs = [*zip(loader, loader, strict=True)]
    assert pairs and all(np.array_equal(one["image"], two["image"]) for one, two in pairs)


def test_batches_use_named_device_and_collate_function(tmp_path: Path) -> None:
    class Kind:
        def __call__(self, batch: Any) -> dict[str, Any]:
            return {"kind": type(batch).__name__, "labels": [torch.as_tensor(batch["label"].to_numpy().copy())]}

    class OfArrow(Kind, ArrowBatchCollateFn):
        pass

    class OfPandas(Kind, PandasBatchCollateFn):
        pass

    shard = session_of(loop_job(tmp_path), 0).shard("validation")
    wanted = torch.cat([batch["label"] for batch in shard.iter_torch_batches(batch_size=20)])
    for collate_fn, kind in ((OfArrow(), "Table"), (OfPandas(), "DataFrame")):
        given = [*shard.iter_torch_batches(batch_size=20, collate_fn=collate_fn)]
        assert {batch["kind"] for batch in given} == {kind}
        assert torch.equal(torch.cat([batch["labels"][0] for batch in given]), wanted)
    (label, *_) = shard.iter_torch_batches(device="meta", collate_fn=lambda batch: torch.as_tensor(batch["label"]))
    assert label.device.type == "meta"
    (batch, *_) = shard.iter_torch_batches(device="meta")
    assert batch["image"].device.type == "meta"


def test_materialized_rows_equal_first_epoch_in_every_epoch(tmp_path: Path) -> None:
    seen = []
    for rank in (0, 1):
        shard = session_of(loop_job(tmp_path), rank).shard("train")
        kept = shard.materialize()
        assert (kept.count(), kept.schema(), kept.stats()) == (shard.count(), shard.schema(), shard.stats())
        epochs = [[batch["image"] for batch in kept.iter_torch_batches(batch_size=60)] for _ in range(2)]
        assert [len(batch) for batch in epochs[0]] == [60, 60, 46 + rank] and all(map(torch.equal, *epochs))
        epochs[0][0].zero_()  # a loop may change what it gets
        assert torch.equal(next(iter(kept.iter_torch_batches(batch_size=60)))["image"], epochs[1][0])
        seen += [row.numpy().tobytes() for batch in epochs[1] for row in batch]
    whole = session_of(loop_job(tmp_path, datasets={"train": "whole"}), 0).shard("train")
    assert sorted(seen) == sorted(row["image"].tobytes() for row in whole.iter_rows())


def test_data_config_sets_split_datasets_refuses_unsupported(tmp_path: Path) -> None:
    def rows(datasets: Any, name: str) -> int:
        job = loop_job(tmp_path, datasets=datasets)
        if isinstance(datasets, str):
            job = replace(job, data_config=capture(datasets, Path(__file__).parent))
        return sum(len(batch["label"]) for batch in session_of(job, 0).shard(name).iter_batches(batch_size=16))

    for datasets in ("loops.py:data_config", "loops.py:OwnParts", {"validation": "whole"}, {"valid": "whole"}):
        assert rows(datasets, "val") == ROWS["validation"] and rows(datasets, "train") <= ROWS["train"] // 2 + 1
    assert rows({}, "validation") <= ROWS["validation"] // 2 + 1
    with pytest.raises(SpecError) as refused:
        rows("loops.py:OwnShards", "train")
    problems = refused.value.problems
    assert len(problems) == 2 and "execution_options" in problems[0] and "'extra'" in problems[1]
    with pytest.raises(SpecError, match=r"OwnOrder\.configure\(\): random_shuffle\(\) of the dataset 'train'"):
        rows("loops.py:OwnOrder", "train")
    with pytest.raises(SpecError, match=r"is a Block, not a ray\.train\.DataConfig|failed: TypeError"):
        rows("loops.py:Block", "train")
    with pytest.raises(ValueError, match="`datasets` is for `loop`"):
        TrainSpec(recipe="a.py:Net", datasets={"validation": "whole"})


def test_names_of_datasets_are_those_of_splits(tmp_path: Path) -> None:
    session = session_of(loop_job(tmp_path, datasets={"holdout": "test", "holdout_too": "test"}), 0)
    assert session.shard("valid") is session.shard("val") is session.shard("validation")
    assert session.shard("holdout") is session.shard("holdout_too") is session.shard("test")
    with pytest.raises(SpecError, match=r"'val', 'holdout', 'holdout_too'") as refused:
        session.shard("extra")
    assert "train.datasets: {extra: test}" in str(refused.value.next_step)
    with pytest.raises(ValueError, match="test is a split itself"):
        TrainSpec(loop="a.py:f", datasets={"test": "train"})


@pytest.mark.usefixtures("without_ray")
def test_reported_checkpoint_is_read_back_after_its_folder_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = loop_job(tmp_path, "reloads")
    run_alone(job)
    assert capsys.readouterr().out.split("read back ")[1:] == ["0\n", "1\n"]
    other = session_of(job, 1)  # has given no folder, and gets the files of the rank that has
    assert other.get_checkpoint() is None
    other._saved_step = newest(tmp_path).state.step
    checkpoint = other.get_checkpoint()
    assert checkpoint is not None and torch.load(Path(checkpoint.path, "state.pt"), weights_only=True) == 1
    other.close()


@pytest.mark.usefixtures("without_ray")
def test_finished_loop_with_more_epochs_trains_on_to_same_weights(tmp_path: Path) -> None:
    run_alone(loop_job(tmp_path, run="whole"))
    job = loop_job(tmp_path, run="parts")
    run_alone(replace(job, spec=job.spec.model_copy(update={"params": {**PARAMS, "epochs": 1}})))
    more = run_alone(loop_job(tmp_path, run="parts", attempt=2))
    one, two = newest(tmp_path, "whole").manifest, newest(tmp_path, "parts").manifest
    assert (more.resumed_from_step, one.step, one.weights_digest) == (11, two.step, two.weights_digest)
    assert more.exactness.endswith("train.params (epochs)")


@pytest.mark.usefixtures("without_ray")
def test_best_checkpoint_goes_by_a_name_that_the_loop_reports(tmp_path: Path) -> None:
    job = loop_job(tmp_path, checkpoint={"best": {"metric": "loss", "mode": "max"}})
    run_alone(job)
    best = job_checkpoints(job).best()
    assert best is not None and best.state.step == 11
    assert best.manifest.metrics["loss"] > newest(tmp_path).manifest.metrics["loss"]


@pytest.mark.usefixtures("without_ray")
def test_loop_without_checkpoint_or_with_unread_fields_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="ended without a reported checkpoint"):
        run_alone(loop_job(tmp_path, "without_checkpoint"))
    job = loop_job(tmp_path, learning_rate=0.5, batch_rows=64)
    with pytest.raises(SpecError, match=r"does not read train\.batch_rows and train\.learning_rate"):
        RAY_TRAIN.check(job.code, job.spec)
    with pytest.raises(SpecError, match="is a class, not a function"):
        RAY_TRAIN.check(loop_job(tmp_path, "Block").code, loop_job(tmp_path, "Block").spec)
    with pytest.raises(ValueError, match="take one"):
        TrainSpec(loop="a.py:f", recipe="b.py:B")


def test_names_of_an_older_ray_are_refused_with_todays() -> None:
    old = """import horovod.torch as hvd
from ray.air import session
import ray

def train_func(config):
    ray.air.session.report({})
    ray.train.torch.TorchTrainer(train_func, dataset_config={"train": 1})

if __name__ == "__main__":
    TorchTrainer(train_func, dataset_config=ray.train.DataConfig())
"""
    with pytest.raises(SpecError) as refused:
        refuse_old_names({"loop.py": old, "rows.json": "{}", "fine.py": "import ray.train\nray.train.report({})"})
    told = refused.value.problems
    assert [problem.split(": ", 2)[0] for problem in told] == ["loop.py:1", "loop.py:2", "loop.py:6", "loop.py:7"]
    assert "DistributedDataParallel" in told[0] and "ray.train.report" in told[1] and "ray.train.get_checkpoint" in told[2]
    assert "train.datasets" in told[3]
    with pytest.raises(ValueError, match="DDP"):
        TrainSpec(framework="horovod", recipe="model.py:Net")


def test_names_of_the_first_ray_train_are_refused() -> None:
    old = """import ray.rllib
from ray import train
from ray.train import Trainer, CheckpointStrategy, TrainingCallback as Base

def train_func(config):
    state = train.load_checkpoint() or {}
    train.report(loss=0.5, epoch=train.world_size())
    train.report({"loss": 0.5}, checkpoint=None)
    train.report(metrics={"loss": 0.5})
    train.save_checkpoint(model=state)

class Prints(Base):
    pass
"""
    with pytest.raises(SpecError) as refused:
        refuse_old_names({"loop.py": old})
    assert [problem.split(": ")[:2] for problem in refused.value.problems] == [
        ["loop.py:1", "ray.rllib"],
        *(["loop.py:3", f"ray.train.{name}"] for name in ("CheckpointStrategy", "Trainer", "TrainingCallback")),
        ["loop.py:6", "ray.train.load_checkpoint"],
        *(["loop.py:7", f"ray.train.{name}"] for name in ("report(epoch=...)", "report(loss=...)", "world_size")),
        ["loop.py:10", "ray.train.save_checkpoint"],
    ]
    refuse_old_names({"loop.py": "def train_func(train):\n    train.report(loss=1)\n"})


@pytest.fixture
def cluster() -> Any:
    """A local Ray of two CPUs, whose workers are forked."""
    fork_workers_from_here()
    ray.shutdown()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def walks_alike(folder: Path) -> None:
    """Walk Ray's iterables and ours side by side: rows of each batch in three walks, then after one left early."""
    (rays,) = ray.data.range(ROWS["validation"]).streaming_split(1)
    ours = session_of(loop_job(folder, datasets={"validation": "whole"}), 0).shard("validation")
    seen: list[list[Any]] = []
    for iterator, column in ((rays, "id"), (ours, "label")):
        loader, rows = iterator.iter_torch_batches(batch_size=20), iterator.iter_rows()
        seen.append([[len(batch[column]) for batch in loader] for _ in range(3)])
        for _ in loader:
            break
        seen[-1] += [len(batch[column]) for batch in loader], sum(1 for _ in rows), sum(1 for _ in rows)
        seen[-1] += hasattr(loader, "__len__"), hasattr(loader, "__next__")
    assert seen[0] == seen[1] and len(seen[0][0]) > 1


@pytest.mark.slow
@pytest.mark.drill
@pytest.mark.usefixtures("cluster")
def test_loop_killed_on_two_workers_ends_as_undisturbed(tmp_path: Path) -> None:
    listener = Watcher()
    more: dict[str, Any] = {"workers": 2, "every": 2, "batch_size": 16, "once": True}
    whole = RAY_TRAIN.train(loop_job(tmp_path, run="whole", **more), stop=threading.Event(), listener=listener)
    assert (whole.status, whole.step, whole.restarts) == ("finished", 33, 0)
    printed = {(event.rank, line) for event in listener.events if isinstance(event, Printed) for line in event.lines}
    assert {(0, "epoch 0 rows 51"), (1, "epoch 0 rows 50")} <= printed
    points = [p.values for p in read_journal(Storage(str(tmp_path / "whole")), 99) if "train/step_s" in p.values]
    assert points and all(0 < each[f"workers/{n}/data_wait_s"] < each[f"workers/{n}/step_s"] for each in points for n in (0, 1))
    killer = Watcher(14, lambda pids: os.kill(pids[1], signal.SIGKILL), tmp_path / "done")
    held = loop_job(tmp_path, run="killed", until=str(tmp_path / "done"), **more)
    killed = RAY_TRAIN.train(held, stop=threading.Event(), listener=killer)
    assert (killed.status, killed.restarts) == ("finished", 1) and killed.resumed_from_step is not None
    assert killed.weights_digest == whole.weights_digest
    walks_alike(tmp_path)


def in_lanes(job: TrainJob, lanes: int) -> TrainJob:
    shards = job.manifest.opened(job.data_storage).shards_of("train").rows
    order = make_order(ShuffleSpec(seed=17, lanes=lanes), job.order.rows, shards, job.spec.batch_rows)
    assert order.lanes == lanes
    return replace(job, order=order)


def test_batches_that_lanes_do_not_divide_are_refused(tmp_path: Path) -> None:
    job = in_lanes(loop_job(tmp_path, workers=2), 8)
    assert [
        len(next(iter(session_of(job, rank).shard("train").iter_torch_batches(batch_size=4)))["label"]) for rank in (0, 1)
    ] == [4, 4]
    with pytest.raises(SpecError, match=r"shuffle\.lanes is 8, which does not divide the 20 rows of a batch on 2 workers"):
        next(iter(session_of(job, 1).shard("train").iter_torch_batches(batch_size=10)))


@pytest.mark.parametrize(("lanes", "batch_rows", "rest"), [(1, 83, "1 row"), (32, 32, "13 rows")])
def test_last_step_that_misses_a_worker_is_refused(tmp_path: Path, lanes: int, batch_rows: int, rest: str) -> None:
    job = in_lanes(make_job(tmp_path, workers=2, batch_rows=batch_rows), lanes)
    with pytest.raises(SpecError, match=f"has {rest}, which do not reach all 2 workers"):
        train_epochs(job, Group(0, 2, CPU), session_of(job, 0), CPU)


def test_position_of_iter_rows_counts_single_rows(tmp_path: Path) -> None:
    seen: list[int] = []
    shard = session_of(loop_job(tmp_path, workers=2), 0).shard("train")
    passed = shard._passed
    shard._passed = lambda epoch, batch, position, waited: (seen.append(position), passed(epoch, batch, position, waited))[1]
    rows = iter(shard.iter_rows())
    for _ in range(5):
        next(rows)
    assert seen == [2, 4, 6, 8, 10], "of two ranks"


def test_function_gets_one_lane_and_any_number_of_workers(tmp_path: Path) -> None:
    spec = loop_job(tmp_path, workers=3).spec
    assert spec.lane_batch_rows == 1 and ShuffleSpec().most_lanes(spec.lane_batch_rows) == 1
    assert make_job(tmp_path).spec.lane_batch_rows == 48
