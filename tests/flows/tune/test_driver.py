"""A sweep begins no trial once its time is over, and lets those that run come to their end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.flows.tune import driver
from penstock.flows.tune.sweep import Sweep
from penstock.machine.stopping import StopRequest
from penstock.storage import Storage
from penstock.tasks.tune.record import load_trials
from penstock.tasks.tune.spec import TuneSpec


@pytest.mark.parametrize(("time_s", "trials"), [(None, 6), (25.0, 4), (0.1, 2)])
def test_no_trial_begins_after_time_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time_s: float | None, trials: int
) -> None:
    now = [0.0]
    live: list[int] = []

    class Task:
        """Each trial takes ten seconds, two at once."""

        @staticmethod
        def submit(sweep: Any, number: int, ends: Any) -> None:
            live.append(number)
            if len(live) == 2:
                now[0] += 20
                for each in live:
                    sweep.value.update(each, state="done", value=1.0, step=3)
                    ends.value.put((each, None))
                live.clear()

    monkeypatch.setattr(driver, "_trial_task", Task)
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now[0]))
    spec = TuneSpec.model_validate({"space": {"train.learning_rate": {"range": [0.0, 1.0]}}, "trials": 6, "time_s": time_s})
    storage = Storage(str(tmp_path))
    reporter = SimpleNamespace(report=lambda _line: None)
    ctx: Any = SimpleNamespace(storage=storage, run=SimpleNamespace(run="sweep"), stopping=StopRequest(), reporter=reporter)
    driver.perform_trials(Sweep(cast("Any", None), spec, ctx), 2)
    assert [trial.state for trial in load_trials(storage, "sweep")] == ["done"] * trials
    assert Sweep(cast("Any", None), spec, ctx).has_work == (trials < 6), "the next command goes on"
