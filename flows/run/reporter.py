"""Show the progress of a run on stderr: bars on a terminal, an output a stage in a notebook, lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import MissingContextError
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from penstock.progress import Progress, in_notebook
from penstock.redact import redact_text
from penstock.tasks.context import Reporter, StageOutcome

__all__ = ["NotebookReporter", "PlainReporter", "TerminalReporter", "make_reporter"]


_MARK = {"reused": "=", "ran": "+", "resumed": ">"}

_FACTS_SHOWN = {"evaluate": 6}
"""Stage -> number of facts shown, if it is not 3."""

LINE_EVERY_S = 5.0
"""Seconds between two progress lines in a plain log."""


def make_reporter() -> Reporter:
    """Make a reporter: bars if stderr is a terminal, a line a stage in a notebook, else lines."""
    if in_notebook():
        return NotebookReporter()
    return TerminalReporter() if sys.stderr.isatty() else PlainReporter()


def _to_prefect(text: str, level: int = logging.INFO) -> None:
    """Add a line to the flow run's log in Prefect."""
    with contextlib.suppress(MissingContextError):
        get_run_logger().log(level, text)


def _sentence(outcome: StageOutcome) -> str:
    facts = "  ".join(f"{label} {value}" for label, value in outcome.facts[: _FACTS_SHOWN.get(outcome.name, 3)])
    return f"{_MARK[outcome.outcome]} {outcome.name:<12} {outcome.outcome:<8} {outcome.seconds:6.1f} s   {facts}"


class PlainReporter:
    """Prints one line per event; keeps the stderr of its start, since user code's output is redirected here."""

    every_s = LINE_EVERY_S

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._stream = sys.stderr

    def progress(self, stage: str) -> Progress:
        """Return a callable that shows the progress at most every few seconds."""

        def update(done: float, total: float | None, unit: str, note: str = "") -> None:
            now = time.monotonic()
            if now - self._last.get(stage, 0.0) < self.every_s:
                return
            self._last[stage] = now
            of = f" of {total:,.0f}" if total else ""
            self.show(f"  {stage}: {done:,.0f}{of} {unit}" + (f"  {note}" if note else ""))

        return update

    def show(self, progress: str) -> None:
        """Print a line of progress."""
        self.report(progress)

    def report(self, text: str) -> None:
        """Print a line."""
        print(redact_text(text), file=self._stream, flush=True)
        _to_prefect(text)

    def warn(self, text: str) -> None:
        """Print a warning line."""
        self.report(f"warning: {text}")

    def finished(self, outcome: StageOutcome) -> None:
        """Print the outcome of the stage."""
        self.report(_sentence(outcome))


class NotebookReporter(PlainReporter):
    """Shows one output a stage, which its progress changes in place, and prints the other lines."""

    every_s = 0.5

    def __init__(self) -> None:
        super().__init__()
        self._shown: Any = None

    def progress(self, stage: str) -> Progress:
        """Return a callable that changes the stage's output."""
        self._shown = self._shown or sys.modules["IPython"].display.display(_as_text(f"  {stage}"), raw=True, display_id=True)
        return super().progress(stage)

    def show(self, progress: str) -> None:
        """Change the stage's output."""
        if self._shown is not None:
            self._shown.update(_as_text(progress), raw=True)

    def finished(self, outcome: StageOutcome) -> None:
        """Put the outcome of the stage in the place of its progress."""
        if self._shown is None:
            return super().finished(outcome)
        shown, self._shown = self._shown, None
        shown.update(_as_text(_sentence(outcome)), raw=True)
        _to_prefect(_sentence(outcome))


def _as_text(text: str) -> dict[str, str]:
    return {"text/plain": redact_text(text)}


class TerminalReporter:
    """Shows a progress bar of the current stage; keeps the stderr of its start, since user code's output is redirected here."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr, highlight=False, emoji=False)
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._started = 0.0

    def progress(self, stage: str) -> Progress:
        """Return a callable that draws a bar with rate and time left."""
        self._stop()
        self._bar = RichProgress(
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
        self._task = self._bar.add_task(stage, total=None, amount="", note="")
        self._started = time.monotonic()
        self._bar.start()

        def update(done: float, total: float | None, unit: str, note: str = "") -> None:
            if self._bar is None or self._task is None:
                return
            rate = done / max(time.monotonic() - self._started, 1e-6)
            of = f"/{total:,.0f}" if total else ""
            self._bar.update(
                self._task, completed=done, total=total, amount=f"{done:,.0f}{of} {unit}", note=note or f"{rate:,.0f} {unit}/s"
            )

        return update

    def report(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(redact_text(text), markup=False, soft_wrap=True)
        _to_prefect(text)

    def warn(self, text: str) -> None:
        """Print a warning above the bar."""
        self._console.print(f"warning: {redact_text(text)}", style="yellow", markup=False, soft_wrap=True)
        _to_prefect(text, logging.WARNING)

    def finished(self, outcome: StageOutcome) -> None:
        """Replace the bar by the outcome of the stage."""
        self._stop()
        style = "dim" if outcome.outcome == "reused" else "green"
        self._console.print(_sentence(outcome), style=style, markup=False, soft_wrap=True)
        _to_prefect(_sentence(outcome))

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None
