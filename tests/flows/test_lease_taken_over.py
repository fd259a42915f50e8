"""A lease that is lost while a library makes an error of its own of every exception: it is reported, and nothing is written.

The records are another process's then. Around the work stand the real flows and the real handling of the signal.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from penstock.errors import Interrupted, LeaseHeldError, ServiceError
from penstock.flows import pipeline as pipeline_flow
from penstock.flows.run.request import RunRequest
from penstock.machine.stopping import StopRequest
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
    return make_project(tmp_path / "p", files=1)


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
