"""Compare two runs: `penstock compare` as JSON and on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.errors import SpecError
from penstock.flows.history.comparison import compare
from penstock.flows.history.which_run import RunNames
from penstock.messages import counted

__all__ = ["compare_runs", "show_comparison"]

_COLUMNS_SHOWN = 8


def compare_runs(file: Path | None, first: str, second: str) -> dict[str, Any]:
    """Return what `penstock compare --json` prints: how `second` differs from `first`.

    Raises:
        SpecError: there is no such run, or both names mean the same run.
    """
    names = RunNames(file)
    before, after = (names.find(name, lambda run: bool(run.result.get("metrics"))) for name in (first, second))
    if before.run == after.run:
        raise SpecError(
            f"{first!r} and {second!r} are both the run {before.run}", next_step="name two runs: penstock log lists them"
        )
    return compare(names.ledger, before, after)


def show_comparison(compared: dict[str, Any], console: Console) -> None:
    """Print the findings, then the tables behind them."""
    show = console.print
    for side in ("before", "after"):
        run = compared[side]
        show(f"{side:<7} {run['run']}  {run['created']}  {run['status']}  {run['model_uri'] or ''}".rstrip())
    show("        " + ", ".join(f"{'same' if same else 'other'} {what}" for what, same in compared["same"].items()))
    show("")
    for sentence in compared["findings"]:
        show(f"- {sentence}")
    show("")
    table = Table("metric", "before", "after", "difference", box=None)
    for entry in compared["metrics"]:
        values = ["" if entry[side] is None else f"{entry[side]:.4f}" for side in ("before", "after")]
        difference = "" if entry["difference"] is None else f"{entry['difference']:+.4f}"
        word = {True: " better", False: " worse", None: ""}[entry["better"]]
        table.add_row(entry["metric"], *values, difference + word)
    console.print(table, soft_wrap=False)
    for entry in compared["same_rows"]:
        for paired in entry["metrics"]:
            if paired["low"] is not None:
                show(
                    f"on the {counted(entry['rows'], 'row')} of {entry['split']} that both judged: {paired['metric']} "
                    f"{paired['difference']:+.4f}, 95 % interval [{paired['low']:+.4f}, {paired['high']:+.4f}]"
                )
    moved = [entry for entry in compared["data"]["columns"] if entry["drifted"]]
    for entry in moved[:_COLUMNS_SHOWN]:
        show(f"drift   {entry['column']}: {entry['summary'] or entry['kind']}")
    for change in [*compared["changed"]["spec"], *compared["changed"]["versions"]]:
        show(f"{change['name']}: {change['before']} -> {change['after']}")
