"""A sweep begins no trial once its time is over, and lets those that run come to their end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.flows.tune import driver
from penstock.flows.tune.board import Board
from penstock.machine.stopping import StopRequest
from penstock.storage import Storage
from penstock.tasks.tune.record import load_trials
from penstock.tasks.tune.spec import TuneSpec


@pytest.mark.parametrize(("time_s", "trials"), [(None, 6), (25.0, 4), (0.1, 2)])
def test_after_its_time_no_trial_begins_and_those_that_run_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_s: float | None, trials: int
) -> None:
    now = [0.0]
    live: list[int] = []

    class Task:
        """Each trial takes ten seconds, two at once."""

        @staticmethod
        def submit(work: Any, number: int) -> None:
            live.append(number)
            if len(live) == 2:
                now[0] += 20
                for each in live:
                    trial = work.value.trial.model_copy(update={"number": each, "state": "done", "value": 1.0, "step": 3})
                    work.value.inbox.put(driver._Ended(each, trial))
                live.clear()

    monkeypatch.setattr(driver, "_trial_task", Task)
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now[0]))
    spec = TuneSpec.model_validate({"space": {"train.learning_rate": {"range": [0.0, 1.0]}}, "trials": 6, "time_s": time_s})
    storage = Storage(str(tmp_path))
    ctx: Any = SimpleNamespace(storage=storage, run=SimpleNamespace(run="sweep"), stopping=StopRequest())
    sweep: Any = SimpleNamespace(tune=spec, ctx=ctx, hears=None, why_stopped=None)
    driver.Driver(sweep, Board(spec, lambda _line: None)).run(2)
    assert [trial.state for trial in load_trials(storage, "sweep")] == ["done"] * trials
    assert driver.Driver(sweep, Board(spec, lambda _line: None)).has_work == (trials < 6), "the next command goes on"
