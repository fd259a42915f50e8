"""A lease that is lost while a sweep is at work is reported, and nothing is written: the records are another process's then."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.errors import Interrupted, LeaseHeldError, ServiceError
from penstock.flows.run.request import RunRequest
from penstock.flows.spec_file import load_spec
from penstock.flows.tune import driver as tune_driver
from penstock.flows.tune import flow as tune_flow
from penstock.flows.tune import trial as tune_trial
from penstock.flows.tune.sweep import Sweep
from penstock.machine.stopping import StopRequest
from penstock.storage import Storage
from penstock.tasks.tune.record import Trial
from tests.drills.project import make_project
from tests.flows.test_lease_taken_over import LOST, Tracker, as_a_stop, as_an_error_of_its_own, lose, opened, written


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = make_project(tmp_path / "p", files=1)
    made.write_text(made.read_text() + "tune:\n  space: {train.learning_rate: {choice: [0.1]}}\n")
    return made


@pytest.mark.parametrize("made_of_it", [as_an_error_of_its_own, as_a_stop])
def test_a_sweep(file: Path, monkeypatch: pytest.MonkeyPatch, made_of_it: Callable[..., Any]) -> None:
    tracker = Tracker()
    statuses = written(monkeypatch, tune_flow)
    monkeypatch.setattr(tune_flow, "_open_sweep", lambda *given: opened(given[2], tracker))
    monkeypatch.setattr(tune_flow, "Sweep", lambda _loaded, _section, ctx: ctx)
    monkeypatch.setattr(tune_flow, "_perform", lambda ctx, *_: lose(ctx.stopping, made_of_it))
    with pytest.raises(LeaseHeldError) as ended:
        tune_flow.tune.fn(RunRequest(file=str(file)))
    assert ended.value is LOST and tracker.closed == [None] and not statuses


def test_a_sweep_whose_trials_are_under_way(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, stopping = load_spec(file), StopRequest()

    def submit(_sweep: Any, number: int, ends: Any) -> None:
        stopping.give_up(LOST)
        ends.unquote().put((number, ServiceError("the library failed")))

    monkeypatch.setattr(tune_driver, "_trial_task", SimpleNamespace(submit=submit))
    ctx = SimpleNamespace(
        storage=Storage(str(file.parent / "state")),
        run=SimpleNamespace(run="sweep"),
        stopping=stopping,
        reporter=SimpleNamespace(report=print),
    )
    assert loaded.spec.tune is not None
    with pytest.raises(LeaseHeldError) as ended:
        tune_driver.perform_trials(Sweep(loaded, loaded.spec.tune, cast("Any", ctx)), 1)
    assert ended.value is LOST


@pytest.mark.parametrize("error", [ServiceError("the library failed"), Interrupted(signal.SIGINT)])
def test_a_trial(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    tracker, stopping = Tracker(), StopRequest()
    stopping.give_up(LOST)
    statuses = written(monkeypatch, tune_trial)
    sweep = cast("Sweep", SimpleNamespace(ctx=SimpleNamespace(stopping=stopping)))
    with pytest.raises(LeaseHeldError) as ended:
        tune_trial._ended_otherwise(sweep, Trial(number=1, values={}), opened(stopping, tracker), error)
    assert ended.value is LOST and tracker.closed == [None] and not statuses
