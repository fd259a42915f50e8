"""Why was each stage of a run reused or run? From the records of its attempts; nothing is computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.errors import SpecError
from penstock.flows.verbs.which_run import RunNames
from penstock.tasks.stages import STAGES

__all__ = ["explain_run", "show_explanation"]


def explain_run(file: Path | None, name: str, stage: str | None) -> dict[str, Any]:
    """What `penstock explain --json` prints: every attempt of a run with its stages, and because of what each was done.

    Raises:
        SpecError: there is no such run or stage.
    """
    if stage is not None and stage not in STAGES:
        raise SpecError(f"{stage!r} is no stage", next_step=f"use one of {', '.join(STAGES)}")
    names = RunNames(file)
    run = names.find(name)
    attempts = [
        {
            **attempt.model_dump(mode="json", include={"number", "status", "started", "changed", "error"}),
            "stages": [entry for entry in attempt.stages if stage in (None, entry["name"])],
            "reached": [entry["name"] for entry in attempt.stages],
        }
        for attempt in names.ledger.attempts(run.run)
    ]
    cleaned = str(run.cleaned) if run.cleaned is not None else None
    return {"status": "done", "run": run.run, "pipeline": run.pipeline, "cleaned": cleaned, "attempts": attempts}


def show_explanation(result: dict[str, Any], console: Console) -> None:
    """Print it for a person: an attempt after the other, a stage a line, its reasons below."""
    console.print("  ".join(filter(None, [result["run"], result["cleaned"]])), markup=False, soft_wrap=True)
    for attempt in result["attempts"]:
        console.print(f"attempt {attempt['number']}  {attempt['started']}  {attempt['status']}", markup=False, soft_wrap=True)
        told = {line for entry in attempt["stages"] for line in entry.get("because", ())}
        for line in attempt["changed"]:
            if told & {f"{line} changed", line.removeprefix("spec: ")}:
                continue  # a stage below says so
            console.print(f"  changed since the attempt before: {line}", markup=False, soft_wrap=True)
        for entry in attempt["stages"]:
            console.print(f"  {entry['name']:<12} {entry['outcome']:<8} {entry['seconds']:6.1f} s", markup=False)
            for line in entry.get("because", ["not on record"]):
                console.print(f"    {line}", markup=False, soft_wrap=True)
        if not attempt["stages"]:
            console.print(f"  {_why_nothing(attempt)}", markup=False, soft_wrap=True)


def _why_nothing(attempt: dict[str, Any]) -> str:
    if attempt["reached"]:
        return f"it ended before that stage, with {attempt['reached'][-1]}"
    if attempt["status"] in ("running", "killed"):
        return "nothing is on record of its stages: they are written down at the end of an attempt"
    return "it did not get to a stage"
