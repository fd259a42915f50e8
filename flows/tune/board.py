"""How does a person see the trials of a sweep? A live table on a terminal, a line for each event elsewhere; on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table

from penstock.flows.tune.summary import short
from penstock.redact import redact_text
from penstock.tasks.tune.record import Trial
from penstock.tasks.tune.spec import TuneSpec

__all__ = ["Board", "table_of"]

_STYLE = {"done": "green", "stopped": "yellow", "failed": "red", "running": "bold"}
_CUT = "to continue"
"""A trial that is not done and that nobody works on."""


def table_of(tune: TuneSpec, trials: Sequence[Trial], steps: dict[int, str], live: set[int]) -> Table:
    """The trials, best first where they have ended."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("trial", *(key.removeprefix("train.") for key in tune.space), "step", tune.metric, "state"):
        table.add_column(name)
    for trial in trials:
        value = trial.value if trial.value is not None else trial.reports[-1].value if trial.reports else None
        state = trial.state if trial.state != "running" or trial.number in live else _CUT
        step = f"{trial.step:,}" if trial.step else steps.get(trial.number, "")
        cells = [str(trial.number), *(short(trial.values.get(key)) for key in tune.space), step]
        table.add_row(*cells, "" if value is None else f"{value:.4g}", state, style=_STYLE[trial.state])
    return table


class Board:
    """Shows trials as they go."""

    def __init__(self, tune: TuneSpec, say: Callable[[str], None]) -> None:
        self._tune, self._say = tune, say
        self._trials: list[Trial] = []
        self._steps: dict[int, str] = {}
        self._running: set[int] = set()
        self._live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """For the block: draw the table, if stderr is a terminal."""
        if not sys.stderr.isatty():
            yield
            return
        console = Console(stderr=True, highlight=False, emoji=False)
        with Live(get_renderable=self._table, console=console, refresh_per_second=4) as self._live:
            yield
        self._live = None

    def update(self, trials: Sequence[Trial], live: set[int]) -> None:
        """Show these trials; those in `live` are being trained."""
        self._trials, self._running = list(trials), live

    def progress(self, number: int, done: float, total: float | None) -> None:
        """Show how far a trial is, in steps."""
        self._steps[number] = f"{done:,.0f}" + (f"/{total:,.0f}" if total else "")

    def line(self, text: str) -> None:
        """Tell an event; on a terminal above the table."""
        if self._live is not None:
            self._live.console.print(redact_text(text), markup=False, soft_wrap=True)
        else:
            self._say(text)

    def event(self, text: str) -> None:
        """Tell an event that the table shows anyway."""
        if self._live is None:
            self._say(text)

    def _table(self) -> Table:
        return table_of(self._tune, self._trials, self._steps, self._running)
