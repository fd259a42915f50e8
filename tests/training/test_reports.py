"""What becomes of the values and files that a function reports, and of what it returns?"""

from __future__ import annotations

import io
import pickle
import resource
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import PIL.Image
import pytest
import torch
from ray.train.v2.api.context import LocalTrainContext

from penstock.errors import SpecError, TrainingError
from penstock.storage import Storage
from penstock.stores import store_problem
from penstock.training.checkpoint import store as store_module
from penstock.training.checkpoint.manifest import StoredFile
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.start_from import find_start
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.events import Event, Notice, Point, Reported, Saving, Shown, Warned
from penstock.training.frameworks.ray_train.framework import RAY_TRAIN, run_loop_rank
from penstock.training.job import CallbackCode, TrainJob
from penstock.training.on_ray.worker import RankResult
from penstock.training.ranks import Group, is_lost_peer
from penstock.training.session.reported import file_name, sort_values
from penstock.training.session.session import Session
from penstock.training.spec import TrainSpec
from tests.runs.forked import fork_rank
from tests.training.digits import ListClient, make_job, train_alone
from tests.training.ranks import run_ranks
from tests.training.test_ray_train import loop_job, newest, run_alone, without_ray

__all__ = ["without_ray"]

FILE = "reporting_loops.py"


def of_two(group: Group, job: TrainJob) -> tuple[RankResult, list[Event]]:
    context = mock.Mock(wraps=LocalTrainContext(experiment_name="loop"))
    context.get_world_rank.return_value = group.rank
    client = ListClient()
    with mock.patch.object(Session, "get_context", lambda self: context):
        return run_loop_rank(job, group, client), client.events


def test_values_and_files_of_all_ranks_are_kept(tmp_path: Path) -> None:
    job = loop_job(tmp_path, "by_rank", file=FILE, report={"accuracy": "mean", "loss": "max", "only_one": "sum", "typo": "sum"})
    (result, events), (other, _) = run_ranks(of_two, 2, job)
    point = next(event for event in events if isinstance(event, Point))
    assert (point.values["accuracy"], point.values["loss"], point.values["only_one"]) == (0.625, 2.0, 7.0)
    assert [point.values[f"workers/{rank}/accuracy"] for rank in (0, 1)] == [0.5, 0.75]
    assert "train.report: typo: no rank has reported it" in [each.message for each in events if isinstance(each, Warned)]
    checkpoint = newest(tmp_path)
    assert checkpoint.manifest.metrics == {"accuracy": 0.625, "loss": 2.0, "only_one": 7.0}
    files = ["part-0/of/1.bin", "part-1/of/1.bin", "shared.txt"]
    assert sorted(checkpoint.manifest.files) == [*(f"folder/{name}" for name in files), "generators.safetensors"]
    assert job_checkpoints(job).problem(checkpoint.name) is None
    wanted = [{"rank": rank, "files": files, "shared": "of rank 0", "mean": 0.5} for rank in (0, 1)]
    assert [*result.returned] == [*other.returned] == wanted
    reports = [event for event in events if isinstance(event, Reported)]
    assert [(each.ranks[1]["accuracy"], each.ranks[1]["report/iteration"]) for each in reports] == [(0.75, 1.0), (0.75, 2.0)]
    pids = {each["report/pid"] for each in reports[0].ranks}
    assert len(pids) == 2 and all({"report/node", "report/date"} <= each.keys() for each in reports[0].ranks)
    assert 0 < reports[1].ranks[0]["report/time_s"] < reports[1].ranks[0]["report/total_s"]


@pytest.mark.usefixtures("without_ray")
def test_images_texts_and_arrays_become_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = ListClient()
    result = run_alone(loop_job(tmp_path, "shows", file=FILE), client)
    files = {event.name: event.content for event in client.events if isinstance(event, Shown)}
    names = ["image", "pixels", "weights/first", "words"]
    assert [*files] == [f"reports/{name}/0000000001.{'txt' if name == 'words' else 'png'}" for name in names]
    images = [PIL.Image.open(io.BytesIO(content)).size for name, content in files.items() if name.endswith("png")]
    assert images == [(8, 8), (8, 8), (400, 300)] and b"three words" in files.values()
    (warning,) = [event.message for event in client.events if isinstance(event, Warned)]
    assert warning.startswith("ray.train.report: 'odd' is not kept: list is not a number")
    assert newest(tmp_path).manifest.metrics == {"loss": 1.0}
    assert result.returned == ("Identity()",)
    assert "returned is a Identity, which is not JSON: its repr is kept" in capsys.readouterr().out
    assert file_name("../a b/ü?.png", 3) == "reports/a b/ü_/0000000003.png"


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize(
    ("function", "problem"),
    [("too_large", r"'essay' takes 1,500,000 bytes; at most 1,048,576"), ("own_names", "'report/date' begins with report/")],
)
def test_too_large_or_reserved_value_is_refused(tmp_path: Path, function: str, problem: str) -> None:
    with pytest.raises(TrainingError, match=problem):
        run_alone(loop_job(tmp_path, function, file=FILE))


def stops_early(folder: Path, attempt: int = 1, patience: int = 3, **more: Any) -> TrainJob:
    options = {"metric": "loss", "patience": patience}
    job = loop_job(folder, "no_better", file=FILE, attempt=attempt, callbacks=[{"early_stopping": options}], most=8, **more)
    RAY_TRAIN.check(job.code, job.spec)
    return replace(job, callbacks=(CallbackCode("early_stopping", options),))


@pytest.mark.usefixtures("without_ray")
def test_early_stopping_ends_loop_also_after_resume(tmp_path: Path) -> None:
    client = ListClient()
    ended = run_alone(stops_early(tmp_path / "whole"), client)
    assert (ended.status, ended.state.step) == ("finished", 6)
    message = "early_stopping: loss has not been better than 1 for 3 validations"
    assert [event.message for event in client.events if isinstance(event, Notice)] == [message]
    with pytest.raises(TrainingError, match="killed"):
        run_alone(stops_early(tmp_path / "parts", dies_after=4))
    parts = run_alone(stops_early(tmp_path / "parts", attempt=2))
    assert (parts.status, parts.resumed_from_step, parts.state.step) == ("finished", 5, 6)
    again = run_alone(stops_early(tmp_path / "whole", attempt=2))
    assert (again.status, again.state.step) == ("finished", 6), "killed before the stage's record"
    longer = run_alone(stops_early(tmp_path / "parts", attempt=3, patience=4))
    assert (longer.status, longer.state.step) == ("finished", 7), "another setting is another end"


@pytest.mark.usefixtures("without_ray")
def test_metric_of_early_stopping_nobody_reports_is_warned(tmp_path: Path) -> None:
    client, job = ListClient(), stops_early(tmp_path)
    run_alone(replace(job, callbacks=(CallbackCode("early_stopping", {"metric": "los", "patience": 1}),)), client)
    warned = [event.message for event in client.events if isinstance(event, Warned)]
    assert warned == ["train.callbacks: early_stopping watches 'los', and rank 0 has not reported it"]


def fails_on_rank_1(group: Group, job: TrainJob) -> tuple[str, bool]:
    def copy(folder: Storage, file: str, source: Path) -> StoredFile:
        raise store_problem("s3://b/x", OSError("Connection was closed"))

    try:
        with mock.patch.object(store_module, "_copy", copy) if group.rank == 1 else nullcontext():
            of_two(group, job)
    except Exception as error:
        return type(error).__name__, is_lost_peer(error)
    raise AssertionError("nothing failed")


def test_failing_store_of_a_rank_is_not_the_users_error(tmp_path: Path) -> None:
    ended = run_ranks(fails_on_rank_1, 2, loop_job(tmp_path, "by_rank", file=FILE))
    assert ended == [("LostPeerError", True), ("ServiceError", False)]


@pytest.mark.usefixtures("without_ray")
def test_link_to_folder_in_reported_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"'optimizer' in the folder .* is a link that does not lead to a file"):
        run_alone(loop_job(tmp_path, "links", file=FILE))


def test_values_of_size_one_of_any_type_are_sorted() -> None:
    values = {"word": np.str_("cat"), "odd": "a\ud800", "when": np.datetime64("2026-01-01"), "one": np.array([2])}
    values |= {"complex": torch.tensor(1j), "half": torch.tensor([0.5], dtype=torch.bfloat16), "object": np.array([None])}
    found = sort_values(values, draw=True)
    assert found.texts == {"word": "cat", "odd": "a?"} and found.files == {"word.txt": b"cat", "odd.txt": b"a?"}
    assert found.numbers == {"one": 2.0, "half": 0.5} and {*found.left} == {"when", "complex", "object"}


@pytest.mark.usefixtures("without_ray")
def test_other_callbacks_of_loop_are_refused(tmp_path: Path) -> None:
    job = loop_job(tmp_path, "no_better", file=FILE, callbacks=["ema"])
    with pytest.raises(SpecError, match=r"does not read train\.callbacks") as refused:
        RAY_TRAIN.check(job.code, job.spec)
    assert "early_stopping alone" in str(refused.value)
    with pytest.raises(SpecError, match="mode: min keeps the lowest"):
        wrong = loop_job(tmp_path, "no_better", file=FILE, callbacks=[{"early_stopping": {"metric": "accuracy"}}])
        RAY_TRAIN.check(wrong.code, wrong.spec)
    with pytest.raises(ValueError, match="has one value for all workers"):
        TrainSpec(recipe="a.py:B", report={"loss": "mean"})


@pytest.mark.usefixtures("without_ray")
def test_large_folder_does_not_pass_through_memory(tmp_path: Path) -> None:
    run_alone(loop_job(tmp_path / "warm", "big", file=FILE, megabytes=5))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run_alone(loop_job(tmp_path, "big", file=FILE, megabytes=200))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000, "kB"
    assert newest(tmp_path).manifest.size_bytes > 200 << 20


def test_checkpoint_is_announced_before_its_files_are_placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, client, ends_s = store_module._copy, ListClient(), time.monotonic() + 20

    def copy(place: Storage, file: str, source: Path) -> StoredFile:
        while not any(isinstance(event, Saving) for event in client.events):  # the driver, which may kill, receives it first
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        return real(place, file, source)

    monkeypatch.setattr(store_module, "_copy", copy)
    assert run_alone(loop_job(tmp_path, "two_parts", file=FILE), client).status == "finished"


def test_parts_without_manifest_are_no_checkpoint(tmp_path: Path) -> None:
    store, part = CheckpointStore(Storage(str(tmp_path / "run"))), tmp_path / "part"
    part.write_bytes(b"half")
    store.place(store.new_name(7), {"folder/deep/part": part})
    assert store.newest_valid() == (None, []) and len(store._storage.list()) == 1
    store.clean(None)
    assert store._storage.list() == []


def held_in_second_checkpoint(folder: Path) -> None:
    """Report two checkpoints; the second stops after its first part, once the file `held` is there."""
    real = store_module._copy
    parts: list[str] = []

    def copy(place: Storage, file: str, source: Path) -> StoredFile:
        stored = real(place, file, source)
        parts.append(file)
        while len(parts) == 3:
            (folder / "held").touch()
            time.sleep(0.01)
        return stored

    context = LocalTrainContext(experiment_name="loop")
    with mock.patch.object(store_module, "_copy", copy), mock.patch.object(Session, "get_context", lambda self: context):
        run_alone(loop_job(folder, "two_parts", file=FILE))


@pytest.mark.drill
@pytest.mark.usefixtures("without_ray")
def test_kill_between_parts_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    (tmp_path / "call").write_bytes(pickle.dumps((held_in_second_checkpoint, tmp_path)))
    process = fork_rank(tmp_path / "call")
    while not (tmp_path / "held").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    store = CheckpointStore(Storage(str(tmp_path / "run")))
    found, warnings = store.newest_valid()
    assert found is not None and (found.state.step, warnings, len(store._storage.list())) == (1, [], 2)
    again = run_alone(loop_job(tmp_path, "two_parts", file=FILE, attempt=2))
    assert (again.resumed_from_step, again.status) == (1, "finished") and len(store._storage.list()) == len(store.committed())


def starting_from(folder: Path, name: str, run: str) -> TrainJob:
    """A job of the function `goes_on` that begins with what `name` names."""
    start = find_start(name, folder, Storage(str(folder)), whole=True)
    job = loop_job(folder, "goes_on", file=FILE, run=run, start_from=name)
    RAY_TRAIN.check(job.code, job.spec)
    start.store(job.run_storage)
    return job


@pytest.mark.usefixtures("without_ray")
def test_function_begins_with_named_file_folder_or_run(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "count").write_text("40")
    (tmp_path / "count").write_text("70")
    by_folder = run_alone(starting_from(tmp_path, "base", "runs/one"))
    assert by_folder.returned == ([40, 41],) and by_folder.resumed_from_step is None
    again = replace(starting_from(tmp_path, "base", "runs/one"), attempt=2)
    assert run_alone(again).returned == ([41, 42],), "what continues has a checkpoint of its own"
    assert run_alone(starting_from(tmp_path, "count", "runs/two")).returned == ([70, 71],)
    assert run_alone(starting_from(tmp_path, "run:one", "runs/three")).returned == ([42, 43],)
    train_alone(make_job(tmp_path, run="runs/recipe", max_steps=1))
    of_recipe = starting_from(tmp_path, "run:recipe", "runs/four")
    assert [*of_recipe.run_storage.tree("start_from")] == ["start_from/folder/model.safetensors"]
    digests = [find_start(name, tmp_path, Storage(str(tmp_path)), whole=True).digest for name in ("base", "count", "run:one")]
    (tmp_path / "base" / "count").write_text("41")
    assert len({*digests, find_start("base", tmp_path, Storage(str(tmp_path)), whole=True).digest}) == 4
    with pytest.raises(SpecError, match="is not a file of weights"):
        find_start("base", tmp_path, Storage(str(tmp_path)))
