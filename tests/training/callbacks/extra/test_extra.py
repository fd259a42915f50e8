"""Do the further callbacks keep what they show over a stop, and change nothing of what is learned?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock.storage import Storage
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.state_files import weights_of
from penstock.training.checkpoint.store import CheckpointStore
from tests.training.digits import make_job, train_alone


def newest(folder: Path, run: str) -> Checkpoint:
    checkpoint, _ = CheckpointStore(Storage(str(folder / run))).newest_valid()
    assert checkpoint is not None
    return checkpoint


def test_resumed_run_ends_as_a_whole_one(tmp_path: Path) -> None:
    more: dict[str, Any] = {"callbacks": [{"ema": {"decay": 0.5}}], "validate_every_steps": 2}
    whole = train_alone(make_job(tmp_path, run="whole", **more))
    for attempt, max_steps in enumerate([4, whole.state.step - 2, None], start=1):
        parts = train_alone(make_job(tmp_path, run="parts", attempt=attempt, max_steps=max_steps, **more))
    one, two = newest(tmp_path, "whole").manifest, newest(tmp_path, "parts").manifest
    assert parts.state == whole.state and one.weights_digest == two.weights_digest and one.metrics == two.metrics
    points = [p for p in read_journal(Storage(str(tmp_path / "parts")), 99) if "train/loss" in p.values]
    assert len(points) == whole.state.step


def test_moving_average_is_saved_and_validated(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, run="plain", max_steps=3))
    train_alone(make_job(tmp_path, run="ema", max_steps=3, callbacks=[{"ema": {"decay": 0.9}}]))
    train_alone(make_job(tmp_path, run="longer", callbacks=[{"ema": {"decay": 0.9}}]))
    train_alone(make_job(tmp_path, run="ema", attempt=2, callbacks=[{"ema": {"decay": 0.9}}]))
    plain, ema = weights_of(newest(tmp_path, "plain").storage), newest(tmp_path, "ema")
    assert ema.manifest.weights_digest == newest(tmp_path, "longer").manifest.weights_digest
    assert not torch.equal(plain["head.weight"], weights_of(ema.storage)["head.weight"])
    losses = [p.values["train/loss"] for p in read_journal(Storage(str(tmp_path / "longer")), 14) if "train/loss" in p.values]
    train_alone(make_job(tmp_path, run="plain", attempt=2))
    plain_losses = [
        p.values["train/loss"] for p in read_journal(Storage(str(tmp_path / "plain")), 14) if "train/loss" in p.values
    ]
    assert losses == plain_losses  # what is shown changes nothing of what is learned
