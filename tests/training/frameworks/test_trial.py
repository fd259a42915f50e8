"""Do two batches of any function or framework train, report and save before a run, and do wrong ones end with their line?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from penstock.errors import PenstockError, TrainingError
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.frameworks import trial
from penstock.training.frameworks.ray_train.framework import RAY_TRAIN
from penstock.training.job import TrainJob
from penstock.training.on_ray.stacks import user_line
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture
from tests.runs.forked import fork_trials_from_here
from tests.training.digits import CPU, ListClient, make_job

LOOPS = """\
import itertools
import os
import tempfile
from pathlib import Path

import ray.train
import ray.train.collective
import torch


def save(values, text="state"):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "state").write_text(text)
        ray.train.report(values, checkpoint=ray.train.Checkpoint.from_directory(folder))


def rows():
    return ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=16)


def for_ever(config):
    batches = rows()
    while True:
        try:
            for batch in batches:
                len(batch["label"])
        except Exception:
            pass


def saves_after_each_epoch(config):
    assert ray.train.get_context().get_world_size() == 1 and ray.train.torch.get_device().type == "cpu"
    model = ray.train.torch.prepare_model(torch.nn.Linear(64, 10))
    for epoch in range(1000):
        for batch in rows():
            model(batch["image"].reshape(-1, 64)).sum().backward()
        ray.train.collective.barrier()
        save({"loss": 1.0})


def counts_batches(config):
    batches = iter(rows())
    for step in range(1000):
        len(next(batches)["label"])


def saves_seldom(config):
    for step, batch in enumerate(rows()):
        if step == 5:
            save({"loss": 1.0})


def own_rows(config):
    for step in itertools.count():
        save({"loss": 1.0}, str(step))


def unknown_rows(config):
    ray.train.get_dataset_shard("holdout")


def wrong_report(config):
    for batch in rows():
        loss = batch["label"].sum()
    ray.train.report({"loss": losses.mean()})


def wrong_model(config):
    save({"loss": 1.0}, "of-a-model")


def ends(config):
    import time

    time.sleep(1000)


def dies(config):
    os._exit(7)


def load_model(folder, config):
    if Path(folder, "state").read_text() == "of-a-model":
        raise KeyError("weight")
    return torch.nn.Linear(64, 10)


def predict(model, batch):
    return model(batch["image"].reshape(-1, 64))
"""


def loop_job(folder: Path, function: str) -> TrainJob:
    """The job of a trial; rows and run are below `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "loops.py").write_text(LOOPS)
    spec = TrainSpec(loop=f"loops.py:{function}", max_steps=2)
    return replace(make_job(folder), spec=spec, code=capture(f"loops.py:{function}", folder), open_feeds=None)


@pytest.mark.parametrize(
    ("function", "batches", "saved"),
    [
        ("for_ever", 2, 0),
        ("saves_after_each_epoch", 2, 1),
        ("counts_batches", 2, 0),
        ("saves_seldom", 2, 0),
        ("own_rows", 0, 1),
    ],
)
def test_function_ends_after_its_second_batch(tmp_path: Path, function: str, batches: int, saved: int) -> None:
    job = loop_job(tmp_path, function)
    assert RAY_TRAIN.try_rank(job, Group(0, 1, CPU), ListClient()) == batches
    assert len(job_checkpoints(job).committed()) == saved


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("unknown_rows", r"get_dataset_shard\('holdout'\): the pipeline has 'train', 'validation'"),
        ("wrong_report", r"NameError: .*'losses'.* \(.*loops\.py:\d+ in wrong_report: ray\.train\.report"),
    ],
)
def test_wrong_function_is_refused_with_its_line(tmp_path: Path, function: str, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        RAY_TRAIN.try_rank(loop_job(tmp_path, function), Group(0, 1, CPU), ListClient())


@pytest.mark.slow
def test_process_of_trial_says_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_trials_from_here()
    with pytest.raises(TrainingError, match=r"(?s)KeyError: 'weight' \(.*loops\.py:\d+ in load_model"):
        trial.try_apart("ray_train", loop_job(tmp_path, "wrong_model"))
    with pytest.raises(TrainingError, match="the process that tried two batches died with code 7"):
        trial.try_apart("ray_train", loop_job(tmp_path / "again", "dies"))
    assert not dist.is_initialized()
    monkeypatch.setattr(trial, "LIMIT_S", 0.01)
    assert trial.try_apart("ray_train", loop_job(tmp_path / "stuck", "ends")).stuck.startswith("after 0.01 s two batches")


def test_stuck_line_is_of_user_code() -> None:
    libraries = '  File "/usr/lib/python3.11/threading.py", line 3 in wait\n'
    assert user_line(f'Thread 0x1:\n{libraries}  File "/srv/loop.py", line 7 in train_func\n') == "/srv/loop.py:7 in train_func"
    assert user_line(libraries) == ""
