"""What has a pipeline done, by date, and why was each stage of a run reused or run? From the records of attempts."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.errors import SpecError
from penstock.flows.verbs.status import sweeps_among
from penstock.flows.verbs.which_run import RunNames, better_is, main_metric
from penstock.tasks.records.ledger import Attempt, Run
from penstock.tasks.stages import STAGES

__all__ = ["collect_log", "explain_run", "show_explanation", "show_log"]

_CHANGES_SHOWN = 6


def collect_log(file: Path | None, last: int | None = None) -> dict[str, Any]:
    """Return what `penstock log --json` prints: all attempts at all runs, oldest first.

    Args:
        last: only so many of the newest.
    """
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
    """Print it on the terminal: one line an attempt, with what had changed and why it failed below."""
    if not result["attempts"]:
        console.print(f"no runs in {result['storage']}", markup=False, soft_wrap=True)
    for entry in result["attempts"]:
        when = entry["started"][:16].replace("T", " ")
        measured = f"{entry['metric']} {entry['value']:.4f}" if entry["value"] is not None else ""
        if measured and entry["difference"]:
            measured += f" ({entry['difference']:+.4f}, {'better' if entry['better'] else 'worse'})"
        words = [when, entry["run"], f"attempt {entry['attempt']}", entry["outcome"], entry["took"], measured]
        words += [entry["model_uri"] or "", entry["cleaned"] or ""]
        console.print("  ".join(filter(None, words)), markup=False, soft_wrap=True)
        shown = entry["changed"][:_CHANGES_SHOWN]
        more = len(entry["changed"]) - len(shown)
        about = [entry["sweep"]["summary"]] if entry["sweep"] else []
        for line in [*about, *shown, *([f"and {more} more: penstock explain {entry['run']}"] if more else []), *entry["why"]]:
            console.print(f"    {line}", markup=False, soft_wrap=True)


def _entry(run: Run, attempt: Attempt, before: float | None) -> dict[str, Any]:
    metric = main_metric(run)
    value = attempt.metrics.get(metric) if metric is not None else None
    difference = None if value is None or before is None else value - before
    seconds = _seconds(attempt)
    reused = bool(attempt.stages) and all(stage["outcome"] == "reused" for stage in attempt.stages)
    # The stages of a sweep are those that its trials share; the results of trials are shown apart.
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
        "better": None if not difference or metric is None else better_is(run, metric) * difference > 0,
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
    """Print it on the terminal: an attempt after the other, a stage a line, its reasons below."""
    console.print("  ".join(filter(None, [result["run"], result["cleaned"]])), markup=False, soft_wrap=True)
    for attempt in result["attempts"]:
        console.print(f"attempt {attempt['number']}  {attempt['started']}  {attempt['status']}", markup=False, soft_wrap=True)
        reasons = {line for entry in attempt["stages"] for line in entry.get("because", ())}
        for line in attempt["changed"]:
            if reasons & {f"{line} changed", line.removeprefix("spec: ")}:
                continue  # printed below, as the reason of a stage
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
    return "it did not reach a stage"
