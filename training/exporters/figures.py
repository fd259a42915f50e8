"""Figures of an evaluation: scikit-learn's displays of a model's answers, drawn without a screen.

Colours: one blue for measured values, grey for the reference; both read well in print and for colour-blind eyes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.calibration import CalibrationDisplay
from sklearn.metrics import (
    ConfusionMatrixDisplay,
    PrecisionRecallDisplay,
    PredictionErrorDisplay,
    RocCurveDisplay,
    precision_recall_fscore_support,
)

from penstock.ingest.schema import FeedSchema

__all__ = ["class_table", "draw_figures", "export_importance", "export_split", "figure_png", "importance_figure"]


Columns = Mapping[str, NDArray[Any]]
"""See `RowResults.columns`."""

_MEASURED = {"color": "#2166ac", "linewidth": 2}
_REFERENCE = {"color": "#9a9a9a", "linestyle": "--", "linewidth": 1}

CALIBRATION_BINS = 15

MAX_MATRIX_CLASSES = 200
"""With more classes a confusion matrix is neither readable nor small."""

MAX_POINTS = 5_000
"""Points in a scatter plot; more only darken it."""

MOST_COLUMNS = 30
"""Bars of column importance, largest first."""

MOST_NUMBERED_CLASSES = 30
"""Above this, the cells of a confusion matrix are too small to hold a number."""


def export_split(schema: FeedSchema, answers: Columns, split: str) -> tuple[dict[str, bytes], dict[str, dict[str, list[Any]]]]:
    """Draw a model's answers on a split. Returns PNGs by file name, and tables by file name without suffix."""
    drawn, table = draw_figures(schema, answers, split), class_table(schema, answers)
    figures = {f"{split}-{name}.png": figure_png(figure) for name, figure in drawn.items()}
    return figures, {f"{split}-classes": table} if table else {}


def export_importance(shares: Mapping[str, float]) -> dict[str, bytes]:
    """Draw the columns' importance. Returns the PNG by file name."""
    return {"feature_importance.png": figure_png(importance_figure(shares))}


def figure_png(figure: Figure, dpi: int = 140) -> bytes:
    """Encode a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
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
    if schema.num_classes is None:
        return _of_numbers(str(schema.label), answers["predicted"], answers["target"], split)
    target, predicted, confidence = (answers[name] for name in ("target", "predicted", "confidence"))
    drawn = {"calibration": _calibration(predicted == target, confidence, f"Calibration: {split}")}
    if schema.num_classes <= MAX_MATRIX_CLASSES:
        drawn["confusion_matrix"] = _confusion(schema, predicted, target, f"Confusion matrix: {split}")
    if schema.num_classes == 2 and 0 < target.sum() < len(target):  # of one class alone there is no curve
        positive = np.where(predicted == 1, confidence, 1 - confidence)
        drawn |= _curves(positive, target, _names(schema)[1], split)
    return drawn


def class_table(schema: FeedSchema, answers: Columns) -> dict[str, list[Any]]:
    """Tabulate rows, precision, recall and F1 of each class; empty without classes, or with too many."""
    answers = _finite(answers)
    if not answers or not 0 < (schema.num_classes or 0) <= MAX_MATRIX_CLASSES:
        return {}
    classes = range(schema.num_classes or 0)
    scores = precision_recall_fscore_support(answers["target"], answers["predicted"], labels=[*classes], zero_division=0)
    named = dict(zip(("precision", "recall", "f1"), scores, strict=False))
    return {
        "class": _names(schema),
        "rows": scores[3].tolist(),
        "predicted": [int((answers["predicted"] == index).sum()) for index in classes],
        **{name: [round(float(value), 6) for value in values] for name, values in named.items()},
    }


def _finite(answers: Columns) -> Columns:
    if not answers:
        return {}
    finite = np.isfinite(answers.get("confidence", answers["predicted"]))
    return {name: values[finite] for name, values in answers.items()} if finite.any() else {}


def _names(schema: FeedSchema) -> list[str]:
    return [*(schema.classes or map(str, range(schema.num_classes or 0)))]


def _confusion(schema: FeedSchema, predicted: NDArray[Any], target: NDArray[Any], title: str) -> Figure:
    """Draw the share of each true class that was predicted as each class."""
    names = [_short(name) for name in _names(schema)]
    side = float(np.clip(2.6 + 0.45 * len(names), 4.2, 15.0))
    figure, axes = _figure(side + 0.8, side)
    ConfusionMatrixDisplay.from_predictions(
        target,
        predicted,
        labels=[*range(len(names))],
        display_labels=names,
        normalize="true",
        values_format=".0%",
        include_values=len(names) <= MOST_NUMBERED_CLASSES,
        xticks_rotation="vertical" if max(map(len, names)) > 3 else "horizontal",
        cmap="Blues",
        im_kw={"vmin": 0.0, "vmax": 1.0},
        ax=axes,
    )
    axes.set(xlabel="predicted", ylabel="true")
    right = int((predicted == target).sum())
    axes.set_title(f"{title}\n{right:,} of {len(target):,} rows right", loc="left", fontsize=11)
    return figure


def _curves(positive: NDArray[Any], target: NDArray[Any], name: str, split: str) -> dict[str, Figure]:
    """Draw the ROC and the precision-recall curve; `positive` is the probability of class 1, which is called `name`."""
    options = {"curve_kwargs": _MEASURED, "plot_chance_level": True, "chance_level_kw": _REFERENCE, "name": "model"}
    roc, axes = _figure(5.2, 5.0)
    RocCurveDisplay.from_predictions(target, positive, ax=axes, **options)
    _label(axes, "false positive rate", f"true positive rate ({_short(name)})", f"ROC curve: {split}")
    curve, axes = _figure(5.2, 5.0)
    PrecisionRecallDisplay.from_predictions(target, positive, ax=axes, **options)
    _label(axes, f"recall ({_short(name)})", "precision", f"Precision and recall: {split}")
    return {"roc": roc, "precision_recall": curve}


def _calibration(right: NDArray[Any], confidence: NDArray[Any], title: str) -> Figure:
    """Draw how often the model is right, over the probability of the class that it predicts."""
    figure, axes = _figure(5.2, 5.0)
    CalibrationDisplay.from_predictions(
        right, np.clip(confidence, 0, 1), pos_label=True, n_bins=CALIBRATION_BINS, name="model", ax=axes, **_MEASURED
    )
    _label(axes, "confidence: probability of the predicted class", "share of rows predicted rightly", title)
    return figure


def _of_numbers(label: str, predicted: NDArray[Any], true: NDArray[Any], split: str) -> dict[str, Figure]:
    """Draw true values and errors of a regression over its predictions."""
    errors = true - predicted
    spread = f"mean {errors.mean():.4g}, standard deviation {errors.std():.4g}"
    drawn = {}
    for name, kind, y, title in (
        ("predicted_true", "actual_vs_predicted", f"true {label}", f"Predicted and true: {split}"),
        ("errors", "residual_vs_predicted", f"true - predicted {label}", f"Errors: {split}\n{spread}"),
    ):
        drawn[name], axes = _figure(5.4, 5.2)
        PredictionErrorDisplay.from_predictions(
            true,
            predicted,
            kind=kind,
            subsample=min(MAX_POINTS, len(true)),
            random_state=0,
            ax=axes,
            scatter_kwargs={"s": 12, "color": _MEASURED["color"], "alpha": 0.4, "linewidths": 0},
            line_kwargs=_REFERENCE,
        )
        _label(axes, f"predicted {label}", y, title)
    return drawn


def importance_figure(shares: Mapping[str, float], title: str = "Feature importance") -> Figure:
    """Draw how much each column counts for the predictions, as shares of 1 by name; the largest come first."""
    shown = list(shares.items())[:MOST_COLUMNS][::-1]
    figure, axes = _figure(6.2, 1.6 + 0.22 * len(shown))
    axes.barh([_short(name, 40) for name, _ in shown], [share for _, share in shown], color=_MEASURED["color"])
    left_out = f": {len(shown)} of {len(shares)} columns" if len(shown) < len(shares) else ""
    _label(axes, "share", "", f"{title}{left_out}")
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    # Not through pyplot: its registry of open figures is global, and evaluation may run in a thread.
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _label(axes: Axes, x: str, y: str, title: str = "") -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
