"""How do evaluation results look on one page? scikit-learn's displays of counts and curves, drawn without a screen.

Colours: one blue for what was measured, grey for the reference it is compared with; both read well in print and for colour-
blind eyes.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

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
    average_precision_score,
    roc_auc_score,
)

__all__ = [
    "calibration_figure",
    "confusion_figure",
    "figure_png",
    "importance_figure",
    "precision_recall_figure",
    "predicted_true_figure",
    "residuals_figure",
    "roc_figure",
]


Floats = NDArray[np.float64]

Counts = NDArray[np.int64]

_MEASURED = {"color": "#2166ac", "linewidth": 2}
_REFERENCE = {"color": "#9a9a9a", "linestyle": "--", "linewidth": 1}

MAX_POINTS = 5_000
"""Points in a scatter plot; more only darken it."""

MOST_COLUMNS = 30
"""Bars of column importance; the columns behind them count least."""

MOST_NUMBERED_CLASSES = 30
"""Above this, the cells of a confusion matrix are too small to hold a number."""


def figure_png(figure: Figure, dpi: int = 140) -> bytes:
    """Encode a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return buffer.getvalue()


def confusion_figure(counts: Counts, names: Sequence[str], title: str = "Confusion matrix") -> Figure:
    """Draw a confusion matrix.

    Args:
        counts: [classes, classes], rows are true classes, columns predicted ones.
        names: of the classes, in index order.
        title: above the matrix.

    Cells are coloured by the share of their row, so that a rare class is as visible as a common one, and show the count.
    """
    side = float(np.clip(2.6 + 0.45 * len(names), 4.2, 15.0))
    figure, axes = _figure(side + 0.8, side)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    labels = [_short(name) for name in names]
    display = ConfusionMatrixDisplay(shares, display_labels=labels).plot(
        ax=axes,
        cmap="Blues",
        include_values=len(names) <= MOST_NUMBERED_CLASSES,
        xticks_rotation="vertical" if max(map(len, labels), default=0) > 3 else "horizontal",
        im_kw={"vmin": 0.0, "vmax": 1.0},
    )
    if display.text_ is not None:
        for cell, count in zip(display.text_.flat, counts.flat, strict=True):
            cell.set(text=_compact(int(count)) if count else "", fontsize=9)
    axes.set(xlabel="predicted", ylabel="true")
    display.im_.colorbar.set_label("share of the true class")
    axes.set_title(f"{title}\n{int(np.trace(counts)):,} of {int(counts.sum()):,} rows right", loc="left", fontsize=11)
    return figure


def roc_figure(probability: Floats, target: Counts, positive: str, title: str = "ROC curve") -> Figure:
    """Draw true positive rate over false positive rate of a two-class model.

    Args:
        probability: of class 1, [rows].
        target: 0 or 1, [rows]; both are there.
        positive: the name of class 1.
        title: above the curve.
    """
    figure, axes = _figure(5.2, 5.0)
    model = _MEASURED | {"label": f"model, area {roc_auc_score(target, probability):.4f}"}
    RocCurveDisplay.from_predictions(
        target,
        probability,
        ax=axes,
        curve_kwargs=model,
        plot_chance_level=True,
        chance_level_kw=_REFERENCE | {"label": "chance"},
    )
    _label(axes, "false positive rate", f"true positive rate ({_short(positive)})", title)
    return figure


def precision_recall_figure(probability: Floats, target: Counts, positive: str, title: str = "Precision and recall") -> Figure:
    """Draw precision over recall of a two-class model; arguments as for `roc_figure`."""
    figure, axes = _figure(5.2, 5.0)
    model = _MEASURED | {"label": f"model, average precision {average_precision_score(target, probability):.4f}"}
    chance = _REFERENCE | {"label": f"chance, {target.mean():.3f}"}
    PrecisionRecallDisplay.from_predictions(
        target, probability, ax=axes, curve_kwargs=model, plot_chance_level=True, chance_level_kw=chance
    )
    _label(axes, f"recall ({_short(positive)})", "precision", title)
    return figure


def calibration_figure(counts: Counts, confidence: Floats, right: Counts, title: str = "Calibration") -> Figure:
    """Draw how often the model is right, over how sure it is.

    Args:
        counts: rows per bin of confidence, [bins]; the bins divide [0, 1] evenly.
        confidence: sum of the confidence per bin, [bins].
        right: rows predicted rightly per bin, [bins].
        title: above the plot.
    """
    filled = counts > 0
    mean_confidence = confidence[filled] / counts[filled]
    accuracy = right[filled] / counts[filled]
    error = float(np.sum(counts[filled] * np.abs(accuracy - mean_confidence)) / max(counts.sum(), 1))
    figure = Figure(figsize=(5.2, 5.6), layout="constrained")
    axes, below = figure.subplots(2, sharex=True, height_ratios=(5, 1))
    display = CalibrationDisplay(accuracy, mean_confidence, mean_confidence, estimator_name=f"model, error {error:.4f}")
    display.plot(ax=axes, **_MEASURED)
    _label(axes, "", "share of rows predicted rightly", title)
    width = 1.0 / len(counts)
    below.bar((np.arange(len(counts)) + 0.5) * width, counts, width=width * 0.9, color=_MEASURED["color"], alpha=0.5)
    below.set_yscale("symlog", linthresh=1)
    _label(below, "confidence: probability of the predicted class", "rows")
    return figure


def predicted_true_figure(predicted: Floats, true: Floats, label: str, title: str = "Predicted and true") -> Figure:
    """Draw the true values of a regression over its predictions, [rows] each, on equal axes."""
    return _errors(predicted, true, "actual_vs_predicted", (f"predicted {label}", f"true {label}"), title)


def residuals_figure(predicted: Floats, true: Floats, label: str, title: str = "Errors") -> Figure:
    """Draw (true - predicted) of a regression over its predictions, [rows] each."""
    errors = true - predicted
    spread = f"mean {errors.mean():.4g}, standard deviation {errors.std():.4g}"
    return _errors(
        predicted, true, "residual_vs_predicted", (f"predicted {label}", f"true - predicted {label}"), f"{title}\n{spread}"
    )


def importance_figure(shares: Mapping[str, float], title: str = "Feature importance") -> Figure:
    """Draw how much each column counts for the predictions, as shares of 1 by name; the largest come first."""
    shown = list(shares.items())[:MOST_COLUMNS][::-1]
    figure, axes = _figure(6.2, 1.6 + 0.22 * len(shown))
    axes.barh([_short(name, 40) for name, _ in shown], [share for _, share in shown], color=_MEASURED["color"])
    left_out = f": {len(shown)} of {len(shares)} columns" if len(shown) < len(shares) else ""
    _label(axes, "share", "", f"{title}{left_out}")
    return figure


def _errors(predicted: Floats, true: Floats, kind: str, labels: tuple[str, str], title: str) -> Figure:
    figure, axes = _figure(5.4, 5.2)
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
    _label(axes, *labels, title)
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


def _compact(count: int) -> str:
    if count < 10_000:
        return str(count)
    return f"{count / 1000:.0f}k" if count < 1_000_000 else f"{count / 1e6:.1f}M"
