"""List the attempts of a pipeline by date, and explain why each stage was reused or run."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.errors import SpecError
from penstock.flows.verbs.status import sweeps_among
from penstock.flows.verbs.which_run import RunNames, better_sign, main_metric
from penstock.tasks.records.ledger import Attempt, Run
from penstock.tasks.stages import STAGES

__all__ = ["collect_log", "explain_run", "show_explanation", "show_log"]

_CHANGES_SHOWN = 6


def collect_log(file: Path | None, last: int | None = None) -> dict[str, Any]:
    """Return what `penstock log --json` prints: all attempts at all runs, or the `last` ones, oldest first."""
    names = RunNames(file)
    found = [(run, attempt) for run in names.runs for attempt in names.ledger.attempts(run.run)]
    found.sort(key=lambda pair: (pair[1].started, pair[1].number))
    sweeps = sweeps_among(names.ledger, names.runs)
    newest = {run.run: attempt.number for run, attempt in found}
    entries: list[dict[str, Any]] = []
    best: dict[str, float] = {}
    for run, attempt in found:
        entries.append(_entry(run, attempt, best.get(run.pipeline)))
        about = sweeps.get(run.run, {})
        entries[-1] |= {"sweep": about.get("sweep") if attempt.number == newest[run.run] else None}
        trial = about.get("trial")
        if trial is not None and attempt.status == "partial":
            entries[-1]["outcome"] = f"trial {trial['number']} {trial['state']}"
        if entries[-1]["value"] is not None:
            best[run.pipeline] = entries[-1]["value"]
    return {"status": "done", "storage": names.ledger.storage.root, "attempts": entries[-last:] if last else entries}


def show_log(result: dict[str, Any], console: Console) -> None:
    """Print a line for each attempt; below it the changes and why it failed."""
    if not result["attempts"]:
        console.print(f"no runs in {result['storage']}")
    for entry in result["attempts"]:
        when = entry["started"][:16].replace("T", " ")
        measured = f"{entry['metric']} {entry['value']:.4f}" if entry["value"] is not None else ""
        if measured and entry["difference"]:
            measured += f" ({entry['difference']:+.4f}, {'better' if entry['better'] else 'worse'})"
        words = [when, entry["run"], f"attempt {entry['attempt']}", entry["outcome"], entry["took"], measured]
        words += [entry["model_uri"] or "", entry["cleaned"] or ""]
        console.print("  ".join(filter(None, words)))
        shown = entry["changed"][:_CHANGES_SHOWN]
        more = len(entry["changed"]) - len(shown)
        about = [entry["sweep"]["summary"]] if entry["sweep"] else []
        for line in [*about, *shown, *([f"and {more} more: penstock explain {entry['run']}"] if more else []), *entry["why"]]:
            console.print(f"    {line}")


def _entry(run: Run, attempt: Attempt, before: float | None) -> dict[str, Any]:
    metric = main_metric(run)
    value = attempt.metrics.get(metric) if metric is not None else None
    difference = None if value is None or before is None else value - before
    seconds = _seconds(attempt)
    reused = bool(attempt.stages) and all(stage["outcome"] == "reused" for stage in attempt.stages)
    # A sweep's own stages are those its trials share; trials may have trained all the same.
    nothing_new = attempt.status == "done" and reused and run.sweep != run.run
    return {
        "started": attempt.started,
        "run": run.run,
        "pipeline": run.pipeline,
        "attempt": attempt.number,
        "status": attempt.status,
        "outcome": "done, all reused" if nothing_new else attempt.status,
        "seconds": seconds,
        "took": "" if seconds is None else f"{dt.timedelta(seconds=round(seconds))}",
        "metric": metric,
        "value": value,
        "difference": difference,
        "better": None if not difference or metric is None else better_sign(run, metric) * difference > 0,
        "model_uri": attempt.model_uri,
        "cleaned": str(run.cleaned) if run.cleaned is not None else None,
        "changed": attempt.changed,
        "why": attempt.why_failed(run.cleaned),
    }


def _seconds(attempt: Attempt) -> float | None:
    if attempt.ended is None:
        return None
    return (dt.datetime.fromisoformat(attempt.ended) - dt.datetime.fromisoformat(attempt.started)).total_seconds()


def explain_run(file: Path | None, name: str, stage: str | None) -> dict[str, Any]:
    """Return what `penstock explain --json` prints: every attempt of a run with its stages, and the reasons of each.

    Raises:
        SpecError: there is no such run or stage.
    """
    if stage is not None and stage not in STAGES:
        raise SpecError(f"{stage!r} is not a stage", next_step=f"use one of {', '.join(STAGES)}")
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
    """Print the stages of each attempt, with the reasons below each."""
    console.print("  ".join(filter(None, [result["run"], result["cleaned"]])))
    for attempt in result["attempts"]:
        console.print(f"attempt {attempt['number']}  {attempt['started']}  {attempt['status']}")
        reasons = {line for entry in attempt["stages"] for line in entry.get("because", ())}
        for line in attempt["changed"]:
            if reasons & {f"{line} changed", line.removeprefix("spec: ")}:
                continue  # printed below, as the reason of a stage
            console.print(f"  changed since the attempt before: {line}")
        for entry in attempt["stages"]:
            console.print(f"  {entry['name']:<12} {entry['outcome']:<8} {entry['seconds']:6.1f} s")
            for line in entry.get("because", ["not on record"]):
                console.print(f"    {line}")
        if not attempt["stages"]:
            console.print(f"  {_explain_no_stages(attempt)}")


def _explain_no_stages(attempt: dict[str, Any]) -> str:
    if attempt["reached"]:
        return f"the attempt ended before this stage, after {attempt['reached'][-1]}"
    if attempt["status"] in ("running", "killed"):
        return "no stages on record: an attempt records them when it ends"
    return "the attempt did not reach a stage"
