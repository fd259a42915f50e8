"""Does a log without a terminal have whole lines, and few of progress?"""

from __future__ import annotations

import pytest

from penstock.flows.run import reporter
from penstock.flows.run.reporter import ConsoleReporter
from penstock.tasks.context import StageOutcome


def test_plain_log_has_whole_lines_and_few_of_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(reporter.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = ConsoleReporter()
    update = shown.progress("train")
    for step in range(1, 10):
        update(step, 1000, "steps", "epoch 1")
        now[0] += 1.0
    long = "x " * 200 + "[red] :smile: 1.5"
    shown.report(long)
    shown.warn("slow")
    shown.finished(StageOutcome("train", "k", "ran", 9.0, {}, (("steps", "9"),)))
    assert capsys.readouterr().err.splitlines() == [
        "  train: 1 of 1,000 steps  epoch 1",
        "  train: 6 of 1,000 steps  epoch 1",
        long,
        "warning: slow",
        "+ train        ran         9.0 s   steps 9",
    ]
