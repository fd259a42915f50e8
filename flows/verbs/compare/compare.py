"""How do two runs differ, and why is one worse? Everything that `penstock compare` says, as JSON and on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.errors import SpecError
from penstock.flows.verbs.compare.findings import findings
from penstock.flows.verbs.compare.results import compare_metrics, curves, same_rows
from penstock.flows.verbs.compare.source import code_diffs
from penstock.flows.verbs.which_run import RunNames, main_metric
from penstock.tasks.records.changes import Before, changes
from penstock.tasks.records.data import RunData, compare_data
from penstock.tasks.records.ledger import Run

__all__ = ["compare_runs", "show_comparison"]

_COLUMNS_SHOWN = 8


def compare_runs(file: Path | None, first: str, second: str) -> dict[str, Any]:
    """What `penstock compare --json` prints: `second` is held against `first`.

    Raises:
        SpecError: there is no such run, or both are one.
    """
    names = RunNames(file)
    before, after = names.find(first), names.find(second)
    if before.run == after.run:
        raise SpecError(
            f"{first!r} and {second!r} are both the run {before.run}", next_step="name two runs: penstock log lists them"
        )
    sides = Before.of(names.ledger, before), Before.of(names.ledger, after)
    found = changes(*sides)
    data = RunData.of(names.ledger, before), RunData.of(names.ledger, after)
    compared = {
        "status": "done",
        "before": _described(before),
        "after": _described(after),
        "main_metric": main_metric(after),
        "same": {
            "data": not found.files,
            "code": not found.code,
            "spec": not found.spec,
            "versions": not found.versions,
        },
        "changed": found.model_dump(mode="json", include={"spec", "versions"}),
        "code": code_diffs(*sides, found),
        "data": compare_data(*data, found.files),
        "metrics": compare_metrics(before, after),
        "same_rows": same_rows(names.ledger, before, after, data),
        "curves": curves(names.ledger, (before, after)),
    }
    gone = [
        f"{of.run} was {of.cleaned}: its answers are gone, so not compared row by row" for of in (before, after) if of.cleaned
    ]
    return {**compared, "findings": [*gone, *findings(compared)]}


def show_comparison(compared: dict[str, Any], console: Console) -> None:
    """Print it for a person: sentences first, then the tables they came from."""

    def say(line: str, **options: Any) -> None:
        console.print(line, markup=False, soft_wrap=True, **options)

    for side in ("before", "after"):
        run = compared[side]
        say(f"{side:<7} {run['run']}  {run['created']}  {run['status']}  {run['model_uri'] or ''}".rstrip())
    say("        " + ", ".join(f"{'same' if same else 'other'} {what}" for what, same in compared["same"].items()))
    say("")
    for sentence in compared["findings"]:
        say(f"- {sentence}")
    say("")
    table = Table("metric", "before", "after", "difference", box=None)
    for entry in compared["metrics"]:
        values = ["" if entry[side] is None else f"{entry[side]:.4f}" for side in ("before", "after")]
        apart = "" if entry["difference"] is None else f"{entry['difference']:+.4f}"
        word = {True: " better", False: " worse", None: ""}[entry["better"]]
        table.add_row(entry["metric"], *values, apart + word)
    console.print(table)
    moved = [entry for entry in compared["data"]["columns"] if entry["drifted"]]
    for entry in moved[:_COLUMNS_SHOWN]:
        say(f"drift   {entry['column']}: {entry['said'] or entry['kind']}")
    for code in compared["code"]:
        say(f"\n{code['file']}")
        for line in code["diff"]:
            say(line, style={"+": "green", "-": "red", "@": "cyan"}.get(line[:1]))
    for change in [*compared["changed"]["spec"], *compared["changed"]["versions"]]:
        say(f"{change['name']}: {change['before']} -> {change['after']}")


def _described(run: Run) -> dict[str, Any]:
    return {
        "run": run.run,
        "pipeline": run.pipeline,
        "created": run.created,
        "status": run.status,
        "model_uri": run.result.get("model_uri"),
        "url": run.result.get("url"),
        "cleaned": str(run.cleaned) if run.cleaned is not None else None,
    }
