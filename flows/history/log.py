"""List the attempts of a pipeline by date."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.flows.history.metrics import is_better, main_metric
from penstock.flows.history.which_run import RunNames
from penstock.flows.verbs.status import sweeps_among
from penstock.messages import capped
from penstock.tasks.records.ledger import Attempt, Run

__all__ = ["collect_log", "show_log"]

_CHANGES_SHOWN = 6


def collect_log(file: Path | None) -> dict[str, Any]:
    """Return what `penstock log --json` prints: all attempts at all runs, oldest first."""
    names = RunNames(file)
    found = [(run, attempt) for run in names.runs for attempt in names.ledger.attempts(run.run)]
    found.sort(key=lambda pair: (pair[1].started, pair[1].number))
    sweeps = sweeps_among(names.ledger, names.runs)
    newest = {run.run: attempt.number for run, attempt in found}
    entries: list[dict[str, Any]] = []
    best: dict[str, float] = {}
    for run, attempt in found:
        if attempt.status == "running" and attempt.process.is_alive is False:
            attempt = names.ledger.as_ended(run, attempt)
        entries.append(_entry(run, attempt, best.get(run.pipeline)))
        about = sweeps.get(run.run, {})
        entries[-1] |= {"sweep": about.get("sweep") if attempt.number == newest[run.run] else None}
        if (trial := about.get("trial")) is not None and attempt.status == "partial":
            entries[-1]["outcome"] = f"trial {trial['number']} {trial['state']}"
        if entries[-1]["value"] is not None:
            best[run.pipeline] = entries[-1]["value"]
    return {"status": "done", "storage": names.ledger.storage.root, "attempts": entries}


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
        about = [entry["sweep"]["summary"]] if entry["sweep"] else []
        for line in [*about, *capped(entry["changed"], _CHANGES_SHOWN), *entry["why"]]:
            console.print(f"    {line}")


def _entry(run: Run, attempt: Attempt, before: float | None) -> dict[str, Any]:
    metric = main_metric(run)
    value = attempt.metrics.get(metric) if metric is not None else None
    difference = None if value is None or before is None else value - before
    began, ended = (None if time is None else dt.datetime.fromisoformat(time) for time in (attempt.started, attempt.ended))
    seconds = (ended - began).total_seconds() if ended and began else None
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
        "better": is_better(run, metric, difference) if difference and metric is not None else None,
        "model_uri": attempt.model_uri,
        "cleaned": str(run.cleaned) if run.cleaned is not None else None,
        "changed": attempt.changed,
        "why": attempt.why_failed,
    }
