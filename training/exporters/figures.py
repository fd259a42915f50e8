"""Figures of an evaluation: scikit-learn's displays of a model's answers, drawn without a screen."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.calibration import CalibrationDisplay
from sklearn.metrics import ConfusionMatrixDisplay, PrecisionRecallDisplay, PredictionErrorDisplay, RocCurveDisplay

from penstock.ingest.schema import FeedSchema

__all__ = ["draw_figures", "export", "figure_png"]

Columns = Mapping[str, NDArray[Any]]
"""See `Answers` of training/evaluation/evaluate.py."""

MAX_MATRIX_CLASSES = 200
"""With more classes a confusion matrix is neither readable nor small."""

MAX_POINTS = 5_000
"""Points in a scatter plot; more only darken it."""

MOST_COLUMNS = 30
"""Bars of column importance, largest first."""

MOST_NUMBERED_CLASSES = 30
"""Above this, the cells of a confusion matrix are too small to hold a number."""

_MOST_LETTERS = 40
"""Of a name in a figure."""


def export(
    schema: FeedSchema, answers: Mapping[str, Columns], importance: Mapping[str, float]
) -> tuple[dict[str, bytes], dict[str, dict[str, list[Any]]]]:
    """Draw a model's answers by split, and the columns' importance. Returns PNGs by file name, and tables by name."""
    drawn = {f"{split}-{name}": each for split, of in answers.items() for name, each in draw_figures(schema, of, split).items()}
    tables: dict[str, dict[str, list[Any]]] = {}
    if importance:
        drawn["feature_importance"] = _draw_importance(importance)
        tables["feature_importance"] = {"column": [*importance], "share": [*importance.values()]}
    return {f"{name}.png": figure_png(figure) for name, figure in drawn.items()}, tables


def _label(name: str) -> str:
    """Shorten a name, and quote dollars: matplotlib sets text between two of them as a formula, and raises if it is none."""
    return name[:_MOST_LETTERS].replace("$", r"\$")


def _draw_importance(shares: Mapping[str, float]) -> Figure:
    """Draw how much each column counts for the predictions, as shares of 1 by name; the largest come first."""
    shown = list(shares.items())[:MOST_COLUMNS][::-1]
    figure = Figure(figsize=(6.2, 1.6 + 0.22 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([_label(name) for name, _ in shown], [share for _, share in shown])
    axes.set_title(f"Feature importance: {len(shown)} of {len(shares)} columns")
    return figure


def figure_png(figure: Figure) -> bytes:
    """Encode a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=140)
    return buffer.getvalue()


def draw_figures(schema: FeedSchema, answers: Columns, split: str) -> dict[str, Figure]:
    """Draw what fits the label, by name; rows whose answer is not a number are left out.

    Args:
        answers: a model's, on the rows of a split.
        split: its name, for the titles.
    """
    answers = _finite(answers)
    if not answers:
        return {}
    target, predicted = answers["target"], answers["predicted"]
    if schema.num_classes is None:
        kinds = {"predicted_true": "actual_vs_predicted", "errors": "residual_vs_predicted"}
        points = {"subsample": min(MAX_POINTS, len(target)), "random_state": 0}
        return {
            name: _draw(PredictionErrorDisplay, target, predicted, split, kind=kind, **points) for name, kind in kinds.items()
        }
    confidence = np.clip(answers["confidence"], 0, 1)
    right = predicted == target
    drawn = {"calibration": _draw(CalibrationDisplay, right, confidence, split, pos_label=True, n_bins=15, name="confidence")}
    drawn["calibration"].axes[0].set(xlabel="confidence of the predicted class", ylabel="share of rows that are right")
    if schema.num_classes <= MAX_MATRIX_CLASSES:
        names = [_label(name) for name in schema.classes or map(str, range(schema.num_classes))]
        drawn["confusion_matrix"] = _draw(
            ConfusionMatrixDisplay,
            target,
            predicted,
            f"{split}: {int(right.sum()):,} of {len(target):,} rows right",
            side=float(np.clip(2.6 + 0.45 * len(names), 5.0, 15.0)),
            labels=[*range(len(names))],
            display_labels=names,
            normalize="true",
            values_format=".0%",
            include_values=len(names) <= MOST_NUMBERED_CLASSES,
            xticks_rotation="vertical",
            cmap="Blues",
        )
    if schema.num_classes == 2 and 0 < target.sum() < len(target):  # of one class alone there is no curve
        positive = np.where(predicted == 1, confidence, 1 - confidence)
        for name, display in (("roc", RocCurveDisplay), ("precision_recall", PrecisionRecallDisplay)):
            drawn[name] = _draw(display, target, positive, split, plot_chance_level=True, name="model")
    return drawn


def _finite(answers: Columns) -> Columns:
    if not answers:
        return {}
    finite = np.isfinite(answers.get("confidence", answers["predicted"]))
    return {name: values[finite] for name, values in answers.items()} if finite.any() else {}


def _draw(display: Any, true: NDArray[Any], answers: NDArray[Any], title: str, side: float = 5.2, **options: Any) -> Figure:
    # Not through pyplot: its registry of open figures is global, and evaluation may run in a thread.
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    display.from_predictions(true, answers, ax=axes, **options)
    axes.set_title(title)
    return figure
