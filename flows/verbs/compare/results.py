"""How do the results of two runs differ? Metrics with intervals on the rows that both judged, and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.flows.verbs.which_run import better_is
from penstock.ingest.schema import SPLITS, Split
from penstock.tasks.records.data import RunData
from penstock.tasks.records.ledger import Ledger, Run
from penstock.training.better import LOWER_IS_BETTER
from penstock.training.checkpoint.journal import read_journal
from penstock.training.evaluation.paired import compare_paired

__all__ = ["compare_metrics", "curves", "same_rows"]

_NEVER = 1 << 60


class Answers(NamedTuple):
    """A model's answers on a split, with the classes as names, so that another numbering of them is no difference."""

    place: NDArray[Any]
    """File and row of each answer; empty where they are not known."""
    target: NDArray[Any]
    predicted: NDArray[Any]
    loss: NDArray[np.float64]
    is_class: bool

    @property
    def right(self) -> NDArray[np.float64]:
        """1 for a right class and 0 for a wrong one."""
        return (self.target == self.predicted).astype(np.float64)


def answers_of(ledger: Ledger, run: Run, data: RunData, split: Split) -> Answers | None:
    """What is on record of a run's model on a split; None if nothing is."""
    table: pa.Table | None = ledger.answers(run.run, split)
    if table is None:
        return None
    files = data.files
    place = np.empty(0, object)
    if "file" in table.column_names:
        # By content: a file of the same name that was written again holds other rows.
        names = [f"{name}\n{files.get(name, {}).get('content')}" for name in table.column("file").combine_chunks().to_pylist()]
        place = np.array([f"{name}\n{row}" for name, row in zip(names, table.column("row").to_pylist(), strict=True)], object)
    target, predicted = table.column("target").to_numpy(), table.column("predicted").to_numpy()
    if classes := data.classes:
        named = np.array(classes, object)
        target, predicted = named[target.astype(int)], named[predicted.astype(int)]
    return Answers(place, target, predicted, table.column("loss").to_numpy().astype(np.float64), bool(classes))


def compare_metrics(before: Run, after: Run) -> list[dict[str, Any]]:
    """Every metric of either run, held-out ones first; `better` says for each whether the later run is."""
    was, now = before.result.get("metrics", {}), after.result.get("metrics", {})
    splits = ("test/", "val/", "train/")
    names = sorted({*was, *now}, key=lambda name: (next((i for i, s in enumerate(splits) if name.startswith(s)), 9), name))
    found = []
    for name in names:
        entry = {"metric": name, "before": was.get(name), "after": now.get(name), "difference": None, "better": None}
        if name in was and name in now:
            entry["difference"] = difference = now[name] - was[name]
            entry["better"] = None if difference == 0 else better_is(after, name) * difference > 0
        found.append(entry)
    return found


def same_rows(ledger: Ledger, before: Run, after: Run, data: tuple[RunData, RunData]) -> list[dict[str, Any]]:
    """By split: both models on the rows that both judged, and the difference with its 95 % interval, row by row."""
    found = []
    for split in SPLITS[1:]:
        sides = [answers_of(ledger, run, side, split) for run, side in zip((before, after), data, strict=True)]
        if sides[0] is None or sides[1] is None or sides[0].is_class != sides[1].is_class:
            continue
        was, now = _aligned(sides[0], sides[1], _same_split(data, split))
        entry: dict[str, Any] = {"split": split, "rows": len(was.loss), "of": [len(side.loss) for side in sides if side]}
        measures = [("accuracy", was.right, now.right)] if was.is_class else []
        measures.append(("log_loss" if was.is_class else "mae", was.loss, now.loss))
        entry["metrics"] = [_paired(name, old, new) for name, old, new in measures] if len(was.loss) else []
        found.append(entry)
    return found


def curves(ledger: Ledger, runs: Sequence[Run]) -> dict[str, list[list[tuple[int, float]]]]:
    """Metric -> for each run its points (step, value), of the losses and of what was measured on held-out rows."""
    points = [read_journal(ledger.run_storage(run.run), _NEVER) for run in runs]
    names = sorted({name for side in points for point in side for name in point.values})
    chosen = [name for name in names if name.startswith("val/") or name == "train/loss"]
    return {
        name: [[(point.step, point.values[name]) for point in side if name in point.values] for side in points]
        for name in chosen
    }


def _same_split(data: tuple[RunData, RunData], split: Split) -> bool:
    digests = [side.manifest.split_digests.get(split) if side.manifest is not None else None for side in data]
    return digests[0] is not None and digests[0] == digests[1]


def _aligned(was: Answers, now: Answers, same: bool) -> tuple[Answers, Answers]:
    """The answers on the rows that both have, in one order."""
    if same and len(was.loss) == len(now.loss):
        return was, now
    _, left, right = np.intersect1d(was.place.astype(str), now.place.astype(str), return_indices=True)
    return _taken(was, left), _taken(now, right)


def _taken(answers: Answers, index: NDArray[np.int64]) -> Answers:
    place = answers.place[index] if len(answers.place) else answers.place
    return Answers(place, answers.target[index], answers.predicted[index], answers.loss[index], answers.is_class)


def _paired(name: str, was: NDArray[np.float64], now: NDArray[np.float64]) -> dict[str, Any]:
    """As `register.promote` measures it."""

    def mean_of(scores: NDArray[np.float64]) -> Callable[..., float]:
        return lambda rows=None: float((scores if rows is None else scores[rows]).mean())

    paired = compare_paired(mean_of(was), mean_of(now), len(was))
    sure = not math.isnan(paired.low) and not paired.low <= 0 <= paired.high
    better = (paired.difference > 0) == (name not in LOWER_IS_BETTER) if sure else None
    found = {"metric": name, "before": paired.before, "after": paired.after, "difference": paired.difference}
    interval = {side: None if math.isnan(value) else value for side, value in (("low", paired.low), ("high", paired.high))}
    return {**found, **interval, "sure": sure, "better": better}
