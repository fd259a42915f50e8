"""Are callbacks called when they should be, kept in the checkpoint, and part of a resume that ends as an undisturbed run?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError, SpecError, TrainingError
from penstock.storage import Storage
from penstock.training.callbacks.callback import load_callbacks
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.events import Notice
from penstock.training.job import CallbackCode
from penstock.training.spec import TrainSpec
from tests.training.digits import ListClient, make_job, train_alone
from tests.training.ranks import train_ranks


def newest(folder: Path, run: str) -> Checkpoint:
    checkpoint, _ = CheckpointStore(Storage(str(folder / run))).newest_valid()
    assert checkpoint is not None
    return checkpoint


def diary(folder: Path, **more: Any) -> list[dict[str, Any]]:
    return [{"recipes.py:Diary": {"folder": str(folder), **more}}]


def test_user_callback_keeps_its_state_over_a_stop(tmp_path: Path) -> None:
    more: dict[str, Any] = {"callbacks": diary(tmp_path)}
    train_alone(make_job(tmp_path, max_steps=9, **more))
    train_alone(make_job(tmp_path, attempt=2, **more))
    assert (tmp_path / "diary").read_text().splitlines() == [
        *("0 start 0", "7 epoch 1", "7 validation val/loss", "7 checkpoint"),
        *("9 validation val/loss", "9 checkpoint", "9 end 9"),
        *("9 start 9", "14 epoch 2", "14 validation val/loss", "14 checkpoint", "14 end 14"),
    ]
    points = read_journal(Storage(str(tmp_path / "run")), 14)
    assert [p.values["mine/count"] for p in points if "mine/count" in p.values] == list(range(1, 15))
    assert newest(tmp_path, "run").manifest.exactness == "same-order: step 9 was validated because training ended there"


def test_stop_of_one_rank_ends_all_at_that_step(tmp_path: Path) -> None:
    more: dict[str, Any] = {"callbacks": diary(tmp_path, stop_at=4, stop_on_rank=1), "workers": 2}
    jobs = [make_job(tmp_path, attempt=attempt, **more) for attempt in (1, 2)]
    first, again = train_ranks(*jobs)
    assert (first.status, first.state.step) == (again.status, again.state.step) == ("finished", 4)
    assert "val/loss" in newest(tmp_path, "run").manifest.metrics


def test_early_stopping_ends_resumed_run_at_the_same_step(tmp_path: Path) -> None:
    callbacks = [{"early_stopping": {"metric": "val/accuracy", "mode": "max", "patience": 2}}]
    more: dict[str, Any] = {
        "callbacks": callbacks,
        "epochs": 40,
        "learning_rate": 0.02,
        "batch_rows": 96,
        "validate_every_steps": 2,
    }
    client = ListClient()
    whole = train_alone(make_job(tmp_path, run="whole", **more), client)
    assert whole.status == "finished" and 10 < whole.state.step < 160
    (notice,) = [event.message for event in client.events if isinstance(event, Notice)]
    assert notice.startswith(f"ends at step {whole.state.step}: early_stopping: val/accuracy has not been better than 0.")
    for attempt, max_steps in enumerate([4, whole.state.step - 2, None], start=1):
        parts = train_alone(make_job(tmp_path, run="parts", attempt=attempt, max_steps=max_steps, **more))
    one, two = newest(tmp_path, "whole").manifest, newest(tmp_path, "parts").manifest
    assert parts.state == whole.state and one.weights_digest == two.weights_digest and one.metrics == two.metrics


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (
            {"recipes.py:Diary": {"folder": "", "fail": True}},
            r"recipes\.py:Diary: step\(\) failed: ValueError: this callback is broken",
        ),
        ("recipes.py:Keeps", r"the state callbacks\.states\.0: recipes\.py:Keeps\.path is of <class 'pathlib"),
        ({"early_stopping": {"metric": "val/none"}}, "watches 'val/none', which validation does not measure"),
        ({"early_stopping": {"metric": "val/los"}}, r"measure; did you mean 'val/loss'\?\nNext: choose one of val/"),
    ],
)
def test_failing_callback_is_named(tmp_path: Path, entry: Any, problem: str) -> None:
    if isinstance(entry, dict) and "recipes.py:Diary" in entry:
        entry["recipes.py:Diary"]["folder"] = str(tmp_path)
    with pytest.raises(TrainingError, match=problem):
        train_alone(make_job(tmp_path, callbacks=[entry], epochs=1))
    if isinstance(entry, dict) and "recipes.py:Diary" in entry:
        assert (tmp_path / "diary").read_text().splitlines()[-1] == "3 failure TrainingError"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (CallbackCode("early_stoping", {}), "did you mean"),
        (CallbackCode("early_stopping", {"patienc": 3}), "unexpected keyword argument 'patienc'"),
        (CallbackCode("early_stopping", {"patience": 0}), "patience is 1 or more"),
        (CallbackCode("early_stopping", {"metric": "val/accuracy"}), "better the higher it is"),
    ],
)
def test_invalid_callback_is_refused_before_training(entry: CallbackCode, problem: str) -> None:
    with pytest.raises(PenstockError) as caught:
        load_callbacks([entry])
    assert problem in str(caught.value) + str(caught.value.next_step)


def test_entry_is_one_name() -> None:
    with pytest.raises(ValueError, match="one name with its options"):
        TrainSpec(recipe="a.py:A", callbacks=[{"ema": {}, "early_stopping": {}}])
    assert issubclass(SpecError, PenstockError)
