"""Make the page of a run: time line, data, curves, throughput, figures, environment."""

from __future__ import annotations

import base64
import datetime as dt
import statistics
from collections.abc import Sequence
from typing import Any

from penstock.flows.history.metrics import sort_by_split
from penstock.flows.history.render import render
from penstock.ingest.manifest import STREAMS, DatasetManifest
from penstock.ingest.schema import SPLITS
from penstock.tasks.records.data import RunData
from penstock.tasks.records.ledger import Attempt, Ledger, Run
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.events import Point

__all__ = ["fetch_sentence", "report_page", "throughput_sentence"]

_NEVER = 1 << 60

_DATA_BOUND = 0.1
"""Share of the time spent waiting for rows above which training counts as data-bound."""


def report_page(ledger: Ledger, run: Run, newest: Attempt | None = None) -> str:
    """Render the page of a run as HTML, from its records.

    Args:
        newest: the newest attempt, if its record is not written yet.
    """
    attempts = [attempt for attempt in ledger.attempts(run.run) if newest is None or attempt.number != newest.number]
    attempts += [newest] if newest is not None else []
    points, data, own = read_journal(ledger.run_storage(run.run), _NEVER), RunData.of(ledger, run), ledger.run_storage(run.run)
    sources, manifest = data.files, data.manifest
    return render(
        title=run.run,
        run=run,
        attempts=attempts,
        line=_time_line(attempts),
        fetched=[fetch_sentence(attempt, manifest) for attempt in attempts],
        metrics=[(name, run.result["metrics"][name]) for name in sort_by_split(run.result.get("metrics", {}))],
        files=list(sources.items())[:200],
        num_files=len(sources),
        rows={split: manifest.rows.get(split, 0) for split in SPLITS} if manifest is not None else {},
        left_out=manifest.rows_left_out if manifest is not None else "",
        classes=data.class_rows(),
        columns=list(data.profile.columns.get("train", {}).items())[:100],
        charts=_charts(points),
        throughput=throughput_sentence(points, streamed=manifest is not None and STREAMS in manifest.extra),
        checkpoints=CheckpointStore(own).committed(),
        figures=[(name, base64.b64encode(own.read_bytes(f"figures/{name}")).decode()) for name in sorted(own.list("figures"))],
        environment=own.read_bytes("environment.txt").decode() if own.exists("environment.txt") else "",
        command=attempts[-1].command if attempts else "",
    )


def fetch_sentence(attempt: Attempt, manifest: DatasetManifest | None) -> str:
    """Describe the bytes that an attempt's nodes fetched to train, and the waits for them; empty if none is on record."""
    if not attempt.fetched:
        return ""
    whole = sum(size for split, size in manifest.table.size_bytes.items() if split != "test") if manifest is not None else 0
    total = sum(node.bytes for node in attempt.fetched.values())
    share = f", {total / whole:.3g} times the rows to train and validate on" if whole else ""
    nodes = ", ".join(
        f"{name} {node.bytes / 1e6:,.1f} MB (waited {node.wait_s:,.1f} s)" for name, node in sorted(attempt.fetched.items())
    )
    return f"fetched from the store {total / 1e6:,.1f} MB{share}: {nodes}"


def throughput_sentence(points: Sequence[Point], *, streamed: bool = False) -> str:
    """Describe the rate, the share of time spent waiting for rows, and what may help; empty if nothing is on record.

    Args:
        streamed: whether rows are prepared while training reads them (`materialize.cache: none`).
    """
    rates = [point.values["train/rows_per_s"] for point in points if "train/rows_per_s" in point.values]
    timed = [point.values for point in points if {"train/step_s", "train/data_wait_s"} <= point.values.keys()]
    if not rates:
        return ""
    sentence = f"It trained {statistics.median(rates):,.0f} rows a second in the median"
    total = sum(values["train/step_s"] for values in timed)
    if not total:
        return sentence + "."
    share = sum(values["train/data_wait_s"] for values in timed) / total
    if share < _DATA_BOUND:
        return f"{sentence}, and waited for rows {share:.0%} of the time: the model takes the time, not the data."
    bound = f"{sentence}. It was data-bound {share:.0%} of the time: the workers waited for rows."
    if streamed:
        return (
            f"{bound} The tasks that prepare them (cache: none) are slower than training: more CPUs or nodes for them, cheaper "
            "transforms, or cache: disk, which prepares rows once, may help."
        )
    return f"{bound} Larger batches, cache: disk, or more CPUs for each worker may help."


def _charts(points: Sequence[Point]) -> list[tuple[str, dict[str, list[tuple[float, float]]]]]:
    """Title -> curves: each held-out metric with its train twin, then learning rate and speed."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        for name, value in point.values.items():
            curves.setdefault(name, []).append((float(point.step), value))
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name in sorted(curves):
        prefix, _, metric = name.partition("/")
        if prefix in ("train", "val") and metric not in ("epoch", "step_s", "data_wait_s"):
            groups.setdefault(metric, {})[name] = curves[name]
        elif metric.endswith("data_wait_s"):
            groups.setdefault("seconds of a step that waited for rows", {})[name] = curves[name]
    first = ("loss", "accuracy", "f1")
    return sorted(groups.items(), key=lambda item: (first.index(item[0]) if item[0] in first else len(first), item[0]))


def _time_line(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """For each attempt its stages as shares of its own duration."""
    found = []
    for attempt in attempts:
        start, spans = dt.datetime.fromisoformat(attempt.started), []
        for stage in attempt.stages:
            began = dt.datetime.fromisoformat(stage["began"]) if stage.get("began") else start
            spans.append((stage, max(0.0, (began - start).total_seconds()), float(stage["seconds"])))
        end = dt.datetime.fromisoformat(attempt.ended) if attempt.ended else start
        total = max([(end - start).total_seconds(), *(at + seconds for _, at, seconds in spans), 0.001])
        bars = [{"stage": stage, "left": 100 * at / total, "width": max(0.4, 100 * s / total)} for stage, at, s in spans]
        found.append({"attempt": attempt, "seconds": total, "bars": bars})
    return found
