"""A lease that is lost while a library makes an error of its own of every exception: it is reported, and nothing is written.

The records are another process's then. Around the work stand the real flows and the real handling of the signal.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from penstock.errors import Interrupted, LeaseHeldError, ServiceError
from penstock.flows import pipeline as pipeline_flow
from penstock.flows.predict import flow as predict_flow
from penstock.flows.predict.request import PredictRequest
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

LOST = LeaseHeldError("taken over by pid 7 on elsewhere")


class Tracker:
    """Hears with which status it is closed."""

    def __init__(self) -> None:
        self.closed: list[str | None] = []
        self.run_id = "tracked"

    def close(self, status: str | None) -> None:
        self.closed.append(status)


def as_an_error_of_its_own(error: BaseException) -> NoReturn:
    raise ServiceError("the library failed") from error


def as_a_stop(error: BaseException) -> NoReturn:
    raise Interrupted(signal.SIGINT) from error


def as_nothing(error: BaseException) -> bool:
    return True


MADE_OF_IT = [as_an_error_of_its_own, as_a_stop, as_nothing]


def lose(stopping: StopRequest, made_of_it: Callable[[BaseException], Any]) -> Any:
    """What a renewal's thread does when another process owns the lease, and what the code in hand makes of it."""
    try:
        stopping.give_up(LOST)
    except LeaseHeldError as error:
        return made_of_it(error)
    raise AssertionError("it was not interrupted")


def written(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    """The statuses with which the module closes an attempt, whose records are the new owner's to change."""
    statuses: list[str] = []
    monkeypatch.setattr(module, "close_attempt", lambda _ctx, status, *_, **__: statuses.append(status))
    return statuses


def opened(stopping: StopRequest, tracker: Tracker) -> Any:
    return SimpleNamespace(stopping=stopping, tracker=tracker, before=None, run=SimpleNamespace(run="run"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = make_project(tmp_path / "p", files=1)
    made.write_text(made.read_text() + "tune:\n  space: {train.learning_rate: {choice: [0.1]}}\n")
    return made


@pytest.mark.parametrize("made_of_it", MADE_OF_IT)
def test_a_run_in_any_stage(file: Path, monkeypatch: pytest.MonkeyPatch, made_of_it: Callable[..., Any]) -> None:
    tracker = Tracker()
    statuses = written(monkeypatch, pipeline_flow)
    monkeypatch.setattr(pipeline_flow, "open_attempt", lambda *given: opened(given[2], tracker))
    monkeypatch.setattr(pipeline_flow, "introduce", lambda _ctx: None)
    monkeypatch.setattr(pipeline_flow, "_perform_stages", lambda ctx, _request: lose(ctx.stopping, made_of_it))
    with pytest.raises(LeaseHeldError) as ended:
        pipeline_flow.pipeline.fn(RunRequest(file=str(file)))
    assert ended.value is LOST and tracker.closed == [None] and not statuses


@pytest.mark.parametrize("made_of_it", [as_an_error_of_its_own, as_a_stop])
def test_a_sweep(file: Path, monkeypatch: pytest.MonkeyPatch, made_of_it: Callable[..., Any]) -> None:
    tracker = Tracker()
    statuses = written(monkeypatch, tune_flow)
    monkeypatch.setattr(tune_flow, "_open_sweep", lambda *given: opened(given[4], tracker))
    monkeypatch.setattr(tune_flow, "_trials", lambda ctx, *_: lose(ctx.stopping, made_of_it))
    with pytest.raises(LeaseHeldError) as ended:
        tune_flow.tune.fn(tune_flow.TuneRequest(file=str(file)))
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


@pytest.mark.parametrize("made_of_it", MADE_OF_IT)
def test_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_of_it: Callable[..., Any]) -> None:
    requests: list[StopRequest] = []

    def make() -> StopRequest:
        requests.append(StopRequest())
        return requests[-1]

    model = SimpleNamespace(uri="models:/m/1", name="m", run_id=None)
    asked = SimpleNamespace(data=SimpleNamespace(train=str(tmp_path / "in")), is_kept=False, model_digest="d", input_digest="i")
    plan = SimpleNamespace(todo=[])
    monkeypatch.setattr(predict_flow, "StopRequest", make)
    monkeypatch.setattr(predict_flow, "fetch_model", lambda *_: model)
    monkeypatch.setattr(predict_flow, "ask", lambda *_: asked)
    monkeypatch.setattr(predict_flow, "list_input", lambda _: SimpleNamespace(describe_left_out=lambda: "", files=[]))
    monkeypatch.setattr(predict_flow, "plan", lambda *_: plan)
    monkeypatch.setattr(predict_flow, "score", lambda *_: lose(requests[0], made_of_it))
    request = PredictRequest(model="m", input=str(tmp_path / "in"), output=str(tmp_path / "out"), state_dir=str(tmp_path))
    (tmp_path / "in").mkdir()
    with pytest.raises(LeaseHeldError) as ended:
        predict_flow.predict.fn(request)
    assert ended.value is LOST
