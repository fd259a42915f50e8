"""Show the progress of a run on stderr: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time

from prefect import get_run_logger
from prefect.exceptions import MissingContextError
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from penstock.progress import Progress
from penstock.redact import redact_text
from penstock.tasks.context import StageOutcome

__all__ = ["ConsoleReporter"]

_MARK = {"reused": "=", "ran": "+", "resumed": ">", "begun": ">"}

_FACTS_SHOWN = {"evaluate": 6}
"""Stage -> number of facts shown, if it is not 3."""

LINE_EVERY_S = 5.0
"""Seconds between two progress lines of a stage in a plain log."""


def _to_prefect(text: str, level: int = logging.INFO) -> None:
    """Add a line to the flow run's log in Prefect."""
    with contextlib.suppress(MissingContextError):
        get_run_logger().log(level, text)


def _sentence(outcome: StageOutcome) -> str:
    facts = "  ".join(f"{label} {value}" for label, value in outcome.facts[: _FACTS_SHOWN.get(outcome.name, 3)])
    return f"{_MARK[outcome.outcome]} {outcome.name:<12} {outcome.outcome:<8} {outcome.seconds:6.1f} s   {facts}"


class ConsoleReporter:
    """A `Reporter` of the stderr of its start, since user code's output is redirected here."""

    def __init__(self) -> None:
        terminal = sys.stderr.isatty()
        self._console = Console(
            file=sys.stderr, highlight=False, emoji=False, markup=False, force_terminal=terminal, force_jupyter=False
        )
        self._bar: RichProgress | None = None
        self._last_s: dict[str, float] = {}

    def progress(self, stage: str) -> Progress:
        """Return a callable that draws a bar with rate and time left, or prints a line every few seconds."""
        self._stop()
        return self._bar_of(stage) if self._console.is_terminal else self._lines_of(stage)

    def _bar_of(self, stage: str) -> Progress:
        bar = self._bar = RichProgress(
            TextColumn("  {task.description:<12}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        task, started_s = bar.add_task(stage, total=None, amount="", note=""), time.monotonic()
        bar.start()

        def update(done: float, total: float | None, unit: str, note: str = "") -> None:
            rate = done / max(time.monotonic() - started_s, 1e-6)
            of = f"/{total:,.0f}" if total else ""
            amount, note = f"{done:,.0f}{of} {unit}", note or f"{rate:,.0f} {unit}/s"
            bar.update(task, completed=done, total=total, amount=amount, note=note)

        return update

    def _lines_of(self, stage: str) -> Progress:
        def update(done: float, total: float | None, unit: str, note: str = "") -> None:
            now_s = time.monotonic()
            if now_s - self._last_s.get(stage, 0.0) >= LINE_EVERY_S:
                self._last_s[stage] = now_s
                of = f" of {total:,.0f}" if total else ""
                self.report(f"  {stage}: {done:,.0f}{of} {unit}" + (f"  {note}" if note else ""))

        return update

    def report(self, text: str) -> None:
        """Print a line, above the bar."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Print a warning line."""
        self._print(f"warning: {text}", "yellow", logging.WARNING)

    def finished(self, outcome: StageOutcome) -> None:
        """Print the outcome of the stage in place of its bar."""
        self._stop()
        self._print(_sentence(outcome), "dim" if outcome.outcome == "reused" else "green")

    def _print(self, text: str, style: str | None = None, level: int = logging.INFO) -> None:
        self._console.print(redact_text(text), style=style, soft_wrap=True)
        _to_prefect(text, level)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
