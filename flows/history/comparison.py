"""How does one run differ from another, in sentences and figures? `penstock compare` as JSON and on the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from penstock.errors import SpecError
from penstock.flows.history.drift import compare_data
from penstock.flows.history.metrics import is_better, main_metric, sort_by_split
from penstock.flows.history.which_run import RunNames
from penstock.ingest.schema import METRICS_OF, SPLITS, Split
from penstock.messages import capped, counted
from penstock.tasks.records.changes import changes
from penstock.tasks.records.data import RunData
from penstock.tasks.records.ledger import Ledger, Run
from penstock.training.evaluation.paired import compare_paired
from penstock.training.spec import LOWER_IS_BETTER

__all__ = ["compare_runs", "show_comparison", "what_to_look_at"]

_FEW = 5


def compare_runs(file: Path | None, first: str, second: str) -> dict[str, Any]:
    """Return what `penstock compare --json` prints: how `second` differs from `first`.

    Raises:
        SpecError: no run has the name, or both names mean the same run.
    """
    names = RunNames(file)
    before, after = (names.find(name, lambda run: bool(run.result.get("metrics"))) for name in (first, second))
    if before.run == after.run:
        raise SpecError(
            f"{first!r} and {second!r} are both the run {before.run}", next_step="name two runs: penstock log lists them"
        )
    return _compare(names.ledger, before, after)


def show_comparison(compared: dict[str, Any], console: Console) -> None:
    """Print the findings, then all metrics."""
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


def _compare(ledger: Ledger, before: Run, after: Run) -> dict[str, Any]:
    found = changes(before, after)
    data = RunData.of(ledger, before), RunData.of(ledger, after)
    compared = {
        "status": "done",
        "before": _describe_run(before),
        "after": _describe_run(after),
        "main_metric": main_metric(after),
        "same": {"data": not found.files, "code": not found.code, "spec": not found.spec, "versions": not found.versions},
        "changed": found.model_dump(mode="json", include={"spec", "versions"}),
        "code": list(found.code),
        "data": compare_data(*data, found.files),
        "metrics": _compare_metrics(before, after),
        "same_rows": _same_rows(ledger, before, after, data),
    }
    gone = [
        f"{of.run} was {of.cleaned}: its answers are deleted, so single rows are not compared"
        for of in (before, after)
        if of.cleaned
    ]
    return {**compared, "findings": [*gone, *_summarize(compared)]}


def what_to_look_at(ledger: Ledger, before: Run, after: Run) -> list[str]:
    """Return the findings of a comparison that a person should see at once: a fall of the main metric, and drift.

    A file with other shares of classes than the rows before is among them: its labels may be wrong.
    """
    return _notable(_compare(ledger, before, after))


def _notable(compared: Mapping[str, Any]) -> list[str]:
    metric = next((entry for entry in compared["metrics"] if entry["metric"] == compared["main_metric"]), None)
    split, _, name = str(compared["main_metric"]).partition("/")
    pairs = [p for part in compared["same_rows"] if METRICS_OF[part["split"]] == split for p in part["metrics"]]
    paired = next((pair for pair in pairs if pair["metric"] == name), None)
    worse = metric is not None and metric["better"] is False and (paired is None or paired["better"] is False)
    files = [_describe_file(file, compared["data"]["classes"]) for file in compared["data"]["files"]]
    odd = [line for line in files if " of class " in line]
    return [*(_describe_metric(compared) if worse else ()), *odd[:_FEW], *_describe_drift(compared["data"])]


def _describe_run(run: Run) -> dict[str, Any]:
    return {
        "run": run.run,
        "pipeline": run.pipeline,
        "created": run.created,
        "status": run.status,
        "model_uri": run.result.get("model_uri"),
        "url": run.result.get("url"),
        "cleaned": str(run.cleaned) if run.cleaned is not None else None,
    }


def _answers_of(ledger: Ledger, run: Run, data: RunData, split: Split) -> pd.DataFrame | None:
    """Read the answers of a run's model on a split; None if they are not on record."""
    table = ledger.answers(run.run, split)
    if table is None:
        return None
    answers = table.to_pandas()
    if "file" in answers:  # by content: a file that was written again holds other rows
        answers["file"] = [f"{name}\n{data.files.get(name, {}).get('content')}" for name in answers["file"]]
    for name in ("target", "predicted") if data.classes else ():  # by name: the numbers of classes may differ between runs
        answers[name] = np.array(data.classes, object)[answers[name].astype(int)]
    return answers


def _compare_metrics(before: Run, after: Run) -> list[dict[str, Any]]:
    """Compare every metric of either run, held-out ones first; `better` is whether the later run is."""
    was, now = before.result.get("metrics", {}), after.result.get("metrics", {})
    found = []
    for name in sort_by_split({*was, *now}):
        entry = {"metric": name, "before": was.get(name), "after": now.get(name), "difference": None, "better": None}
        if name in was and name in now:
            entry["difference"] = difference = now[name] - was[name]
            entry["better"] = is_better(after, name, difference)
        found.append(entry)
    return found


def _same_rows(ledger: Ledger, before: Run, after: Run, data: tuple[RunData, RunData]) -> list[dict[str, Any]]:
    """Compare both models on the rows that both judged, by split, with a 95 % interval of the difference."""
    found = []
    for split in SPLITS[1:]:
        was, now = (_answers_of(ledger, run, side, split) for run, side in zip((before, after), data, strict=True))
        is_class = bool(data[0].classes)
        if was is None or now is None or is_class != bool(data[1].classes):
            continue
        digests = {side.manifest.split_digests.get(split) if side.manifest is not None else None for side in data}
        both = _align(was, now, len(digests) == 1 and None not in digests)
        rows = len(both[0])
        entry: dict[str, Any] = {"split": split, "rows": rows, "of": [len(was), len(now)], "metrics": []}
        if rows and is_class:
            right = [(side["target"] == side["predicted"]).to_numpy(np.float64) for side in both]
            entry["metrics"].append(_compare_scores("accuracy", *right))
        if rows:
            losses = [side["loss"].to_numpy(np.float64) for side in both]
            entry["metrics"].append(_compare_scores("log_loss" if is_class else "mae", *losses))
        found.append(entry)
    return found


def _align(was: pd.DataFrame, now: pd.DataFrame, same: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Select the answers on the rows that both have, in one order."""
    if same and len(was) == len(now):
        return was, now
    if "file" not in was or "file" not in now:  # the rows are not known
        return was.head(0), now.head(0)
    was, now = (each.assign(nth=each.groupby(["file", "row"]).cumcount()) for each in (was, now))  # several of one, by flat_map
    both = was.merge(now, on=["file", "row", "nth"], suffixes=("", "_now"), sort=True)
    return both, both.filter(like="_now").rename(columns=lambda name: name.removesuffix("_now"))


def _compare_scores(name: str, was: NDArray[np.float64], now: NDArray[np.float64]) -> dict[str, Any]:
    """Compare two scores on the same rows, as `register.promote` does."""

    def mean_of(scores: NDArray[np.float64]) -> Callable[..., float]:
        return lambda rows=None: float((scores if rows is None else scores[rows]).mean())

    paired = compare_paired(mean_of(was), mean_of(now), len(was))
    sure = not math.isnan(paired.low) and not paired.low <= 0 <= paired.high
    better = (paired.difference > 0) == (name not in LOWER_IS_BETTER) if sure else None
    found = {"metric": name, "before": paired.before, "after": paired.after, "difference": paired.difference}
    interval = {side: None if math.isnan(value) else value for side, value in (("low", paired.low), ("high", paired.high))}
    return {**found, **interval, "sure": sure, "better": better}


def _summarize(compared: Mapping[str, Any]) -> list[str]:
    """Summarize the other parts of `penstock compare --json` in sentences, the most important first."""
    data, changed = compared["data"], compared["changed"]
    found = [*_describe_metric(compared)]
    found += capped([_describe_file(file, data["classes"]) for file in data["files"]], _FEW)
    found += _describe_drift(data)
    if compared["code"]:
        found.append(f"The code differs in {', '.join(capped(compared['code'], _FEW))}.")
    found += [f"Setting {change['name']}: {change['before']} -> {change['after']}." for change in changed["spec"]]
    found += [f"Version of {change['name']}: {change['before']} -> {change['after']}." for change in changed["versions"]]
    if not (changed["spec"] or changed["versions"] or compared["code"] or data["files"]):
        found.append("Both have the same data, code, settings and versions.")
    return found


def _describe_drift(data: Mapping[str, Any]) -> list[str]:
    found = [
        f"Class {entry['class']!r} is {entry['share_after']:.1%} of the {entry['split']} rows now, and was "
        f"{entry['share_before']:.1%}."
        for entry in data["classes"]
        if entry["drifted"]
    ][:_FEW]
    columns = [
        f"Column {entry['column']!r} has drifted: {entry['summary'] or entry['kind']}."
        for entry in data["columns"]
        if entry["drifted"]
    ]
    return [*found, *capped(columns, _FEW)]


def _describe_metric(compared: Mapping[str, Any]) -> list[str]:
    metric = next((entry for entry in compared["metrics"] if entry["metric"] == compared["main_metric"]), None)
    if metric is None or metric["difference"] is None:
        return []
    split, _, name = metric["metric"].partition("/")
    word = "better" if metric["better"] else "worse"
    if metric["better"] is None:
        return [f"{metric['metric']} is the same: {metric['after']:.4f}."]
    text = f"{metric['metric']} is {word}: {metric['before']:.4f} -> {metric['after']:.4f} ({metric['difference']:+.4f})"
    for entry in compared["same_rows"]:
        for paired in entry["metrics"]:
            if METRICS_OF[entry["split"]] == split and paired["metric"] == name:
                note = "" if paired["sure"] else ", not significant"
                text += f"; on the {counted(entry['rows'], 'row')} that both judged by {paired['difference']:+.4f}"
                if paired["low"] is not None:
                    text += f", 95 % interval [{paired['low']:+.4f}, {paired['high']:+.4f}]{note}"
    return [text + "."]


def _describe_file(file: Mapping[str, Any], classes: list[Mapping[str, Any]]) -> str:
    text = f"{file['name']} was {file['what']}" if file["what"] != "gone" else f"{file['name']} is gone"
    if file["rows"] is not None or file["rows_before"] is not None:
        rows = file["rows"] if file["rows"] is not None else file["rows_before"]
        text += f", {counted(rows, 'row')}"
    total = sum(file["classes"].values())
    differing = []
    for name, count in file["classes"].items():
        was = next((e["share_before"] for e in classes if e["class"] == name and e["split"] == "train"), None)
        if total and was is not None and abs(count / total - was) > 0.1:
            differing.append(f"{count / total:.1%} of class {name!r}, where the rows before had {was:.1%}")
    return text + (": " + "; ".join(differing) if differing else "") + "."
