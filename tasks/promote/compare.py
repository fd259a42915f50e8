"""Which of two registered models predicts the same raw rows better?

Both are loaded from the registry and get raw rows, as in use. An error gives the reason why they cannot be compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from penstock.errors import DataError
from penstock.ingest.schema import FeedSchema
from penstock.messages import counted
from penstock.training.evaluation.metrics import label_kind, make_metrics
from penstock.training.evaluation.paired import Paired, compare_paired
from penstock.training.model import UsualPredicts
from penstock.training.registry.loaded_model import LoadedModel

__all__ = ["ModelsCompared", "Scorer", "compare_models"]

MOST_SCORES = 40_000_000
"""Numbers of each model, 160 MB, with which no further table is read. A row has one, or one for each class."""


class ModelsCompared(NamedTuple):
    """Two models on held-out rows."""

    paired: Paired
    unanswered: int
    """Rows that the new model answers and the other one cannot."""
    lost: int
    """Rows that the other model answers and the new one cannot, with a label or without."""
    neither: int
    """Rows that neither model answers."""
    cut: bool
    """Whether only the first rows were compared, which bounds the memory."""


def compare_models(new: LoadedModel, holder: LoadedModel, metric: str, tables: Iterable[pa.Table]) -> ModelsCompared:
    """Compare both models on the rows that both can answer.

    Args:
        metric: a name from training/evaluation/metrics.py.
        tables: raw rows with their label, as the new model's source has them.

    Raises:
        DataError: they cannot be compared; the message gives the reason, as the end of a sentence.
        SpecError: the metric is unknown or does not fit the label.
    """
    kinds = label_kind(new.schema), label_kind(holder.schema)
    if kinds[0] != kinds[1]:
        raise DataError(f"it predicts {_WORDS[kinds[1]]}, and the new version {_WORDS[kinds[0]]}")
    if kinds[0] not in ("classification", "regression"):
        raise DataError(f"only one class or one number a row can be compared, and they predict {_WORDS[kinds[0]]}")
    for model, whose in ((holder, "it was"), (new, "the new version was")):
        if not model.can_predict:
            raise DataError(f"{whose} trained without {model.predicts_by}")
    targets, outputs, rows, unanswered, lost, neither, first_problem, cut = [], [], 0, 0, 0, 0, None, False
    for table in tables:
        if cut := rows * (new.schema.num_classes or 1) >= MOST_SCORES:
            break
        target, old_target = new.labels(table), holder.labels(table) if kinds[0] == "regression" else None
        known = ~np.isnan(target)
        if old_target is not None:
            both_known = known & ~np.isnan(old_target)
            if not np.allclose(old_target[both_known], target[both_known]):
                raise DataError("its label is prepared otherwise, so that its numbers mean something else")
        (mine, mine_errors), (theirs, their_errors) = (
            _output(model, table, new.schema.classes, target, metric) for model in (new, holder)
        )
        mine_failed, theirs_failed = _failed(mine_errors), _failed(their_errors)
        only_mine = known & ~mine_failed & theirs_failed
        if only_mine.any() and first_problem is None:
            first_problem = their_errors[int(np.flatnonzero(only_mine)[0])]
        unanswered += int(only_mine.sum())
        lost += int((mine_failed & ~theirs_failed).sum())
        neither += int((mine_failed & theirs_failed).sum())
        used = known & ~mine_failed & ~theirs_failed
        rows += int(used.sum())
        targets.append(target[used])
        outputs.append((mine[used], theirs[used]))
    if not rows:
        failed = f" (the new version answers none of {lost + neither:,} rows)" if lost + neither else ""
        raise DataError(first_problem or f"there are no held-out rows with a label that both can answer{failed}")
    target = np.concatenate(targets)
    if kinds[0] == "classification":
        target = target.astype(np.int64)
    after, before = (Scorer(metric, new.schema, np.concatenate([pair[side] for pair in outputs]), target) for side in (0, 1))
    for scorer in (after, before):
        scorer()
        if scorer.undefined is not None:
            raise DataError(f"{metric} is not defined on the {counted(rows, 'row')} that both answer: {scorer.undefined}")
    return ModelsCompared(compare_paired(before, after, rows), unanswered, lost, neither, cut)


_OF_ANSWERS = ("accuracy", "balanced_accuracy", "f1", "precision", "recall")
"""Metrics that go by the class of each answer alone."""

_WORDS = {
    "classification": "classes",
    "multilabel": "several labels a row",
    "regression": "numbers",
    "none": "something without a label",
}


def _output(
    model: LoadedModel, table: pa.Table, classes: tuple[str, ...] | None, target: NDArray[Any], metric: str
) -> tuple[NDArray[np.float32], list[str | None]]:
    """Return [rows, classes of the new model] or [rows], and for each row why it has no answer, or None."""
    answer = model.predict(table, on_error="report")
    errors = answer["error"].tolist()
    if "probabilities" not in answer:
        return answer["prediction"].to_numpy(np.float32, na_value=np.nan), errors
    own = model.schema.num_classes or 0
    cells = [row if error is None else [0.0] * own for row, error in zip(answer["probabilities"], errors, strict=True)]
    given = np.array(cells, np.float32).reshape(len(errors), own)
    names, theirs = classes, model.schema.classes
    if names is None or theirs is None or names == theirs:
        if (names is None) != (theirs is None):
            raise DataError("only one of the two knows its classes by name")
        return given, errors
    # Another numbering, or classes that one of them does not know: by name, 0 for a class that it never predicts.
    placed = np.zeros((len(errors), len(names)), np.float32)
    for index, name in enumerate(names):
        if name in theirs:
            placed[:, index] = given[:, theirs.index(name)]
    # An answer that is none of the new model's classes is wrong, and counts as another class than the label.
    wrong = np.flatnonzero(~np.isin(theirs, names)[given.argmax(axis=1)] & ~np.isnan(target))
    if wrong.size and metric not in _OF_ANSWERS:
        raise DataError(f"it answers with classes that the new version does not know, which {metric} cannot count as wrong")
    placed[wrong, (target[wrong].astype(np.int64) + 1) % len(names)] += 1 - placed[wrong].sum(axis=1)
    return placed / np.maximum(placed.sum(axis=1, keepdims=True), np.finfo(np.float32).tiny), errors


def _failed(errors: list[str | None]) -> NDArray[np.bool_]:
    return np.array([error is not None for error in errors], np.bool_)


class Scorer:
    """One model's metric over any choice of rows, by the code that measures it in the evaluate stage.

    Args:
        metric: a name from training/evaluation/metrics.py.
        schema: names the label and its classes.
        output: float32, [rows, classes] probabilities or [rows] values.
        target: [rows], the class or the value.

    Raises:
        SpecError: the metric is unknown or does not fit the label.
    """

    def __init__(self, metric: str, schema: FeedSchema, output: NDArray[Any], target: NDArray[Any]) -> None:
        self._metric, self._label = metric, str(schema.label)
        self._measured = make_metrics([metric], schema, UsualPredicts(), "register.promote.metric")
        self._measured.predicts = "probabilities"
        self._output = torch.from_numpy(np.ascontiguousarray(output, np.float32))
        self._target = torch.from_numpy(np.ascontiguousarray(target))

    def __call__(self, rows: NDArray[np.int64] | None = None) -> float:
        """Compute the metric over `rows`, or all; NaN if it is undefined (see `undefined`)."""
        index: Any = slice(None) if rows is None else torch.from_numpy(rows)
        self._measured.update(self._output[index], {self._label: self._target[index]})
        return self._measured.compute()[self._metric]

    @property
    def undefined(self) -> str | None:
        """Why the last value is not a number, if the rows leave it undefined."""
        return self._measured.undefined.get(self._metric)
