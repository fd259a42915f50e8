"""How do evaluation results look on one page? Matplotlib figures of counts and curves, drawn without a display.

Colours: one blue for what was measured, grey for the reference it is compared with; both read well in print and for colour-
blind eyes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

__all__ = [
    "calibration_figure",
    "confusion_figure",
    "figure_png",
    "precision_recall_figure",
    "predicted_true_figure",
    "residuals_figure",
    "roc_figure",
]


Floats = NDArray[np.float64]

Counts = NDArray[np.int64]

MEASURED, REFERENCE, INK = "#2166ac", "#9a9a9a", "#222222"

MAX_POINTS = 5_000
"""Points in a scatter plot; more only darken it."""

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
    classes = len(names)
    side = float(np.clip(2.6 + 0.45 * classes, 4.2, 15.0))
    figure, axes = _figure(side + 0.8, side)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    labels = [_short(name) for name in names]
    size = float(np.clip(11 - classes / 8, 7.5, 10))
    rotation, anchor = (0, "center") if _fits(labels) else (60, "right")
    axes.set_xticks(range(classes), labels, rotation=rotation, ha=anchor, fontsize=size)
    axes.set_yticks(range(classes), labels, fontsize=size)
    if not _fits(labels):
        for label in axes.get_xticklabels():
            label.set_rotation_mode("anchor")
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if classes <= MOST_NUMBERED_CLASSES:
        for row, column in np.argwhere(counts > 0):
            dark = shares[row, column] > 0.55
            text = _compact(int(counts[row, column]))
            axes.text(column, row, text, ha="center", va="center", fontsize=size * 0.9, color="white" if dark else INK)
    axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.0)
    axes.tick_params(which="both", length=0)
    bar = figure.colorbar(image, ax=axes, fraction=0.045, pad=0.03)
    bar.set_label("share of the true class", fontsize=9)
    bar.outline.set_visible(False)
    total = int(counts.sum())
    right = int(np.trace(counts))
    axes.set_title(f"{title}\n{right:,} of {total:,} rows right", loc="left", fontsize=11)
    return figure


def roc_figure(probability: Floats, target: Counts, positive: str, title: str = "ROC curve") -> Figure:
    """Draw true positive rate over false positive rate of a two-class model.

    Args:
        probability: of class 1, [rows].
        target: 0 or 1, [rows].
        positive: the name of class 1.
        title: above the curve.
    """
    positives, negatives = _cumulated(probability, target)
    rate_true = positives / max(positives[-1], 1)
    rate_false = negatives / max(negatives[-1], 1)
    area = float(np.trapezoid(rate_true, rate_false))
    figure, axes = _figure(5.2, 5.0)
    axes.plot([0, 1], [0, 1], color=REFERENCE, linestyle="--", linewidth=1, label="chance")
    axes.plot(rate_false, rate_true, color=MEASURED, linewidth=2, label=f"model, area {area:.4f}")
    _unit_square(axes, "false positive rate", f"true positive rate ({_short(positive)})", title)
    axes.legend(loc="lower right", frameon=False)
    return figure


def precision_recall_figure(probability: Floats, target: Counts, positive: str, title: str = "Precision and recall") -> Figure:
    """Draw precision over recall of a two-class model; arguments as for `roc_figure`."""
    positives, negatives = _cumulated(probability, target)
    recall = positives / max(positives[-1], 1)
    precision = positives[1:] / np.maximum(positives[1:] + negatives[1:], 1)
    precision = np.concatenate([precision[:1], precision])
    average = float(np.sum(np.diff(recall) * precision[1:]))
    share = float(np.mean(target)) if len(target) else 0.0
    figure, axes = _figure(5.2, 5.0)
    axes.axhline(share, color=REFERENCE, linestyle="--", linewidth=1, label=f"chance, {share:.3f}")
    axes.step(recall, precision, where="pre", color=MEASURED, linewidth=2, label=f"model, average precision {average:.4f}")
    _unit_square(axes, f"recall ({_short(positive)})", "precision", title)
    axes.legend(loc="lower left", frameon=False)
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
    figure, axes = _figure(5.2, 5.6)
    axes.plot([0, 1], [0, 1], color=REFERENCE, linestyle="--", linewidth=1, label="perfectly calibrated")
    axes.plot(
        mean_confidence, accuracy, color=MEASURED, marker="o", markersize=5, linewidth=2, label=f"model, error {error:.4f}"
    )
    width = 1.0 / len(counts)
    below = axes.inset_axes((0.0, -0.42, 1.0, 0.2), sharex=axes)
    below.bar((np.arange(len(counts)) + 0.5) * width, counts, width=width * 0.9, color=MEASURED, alpha=0.5)
    below.set_yscale("symlog", linthresh=1)
    below.set_ylabel("rows", fontsize=9)
    below.set_xlabel("confidence: probability of the predicted class")
    _plain(below)
    _unit_square(axes, "", "share of rows predicted rightly", title)
    axes.tick_params(labelbottom=False)
    axes.legend(loc="upper left", frameon=False)
    return figure


def predicted_true_figure(predicted: Floats, true: Floats, label: str, title: str = "Predicted and true") -> Figure:
    """Draw predictions of a regression over the true values, [rows] each, on equal axes."""
    figure, axes = _figure(5.4, 5.2)
    shown = _sample(len(true))
    both = np.concatenate([predicted, true]) if len(true) else np.zeros(1)
    low, high = float(np.min(both)), float(np.max(both))
    margin = 0.04 * (high - low or 1.0)
    limits = (low - margin, high + margin)
    axes.plot(limits, limits, color=REFERENCE, linestyle="--", linewidth=1, label="perfect")
    axes.scatter(
        true[shown], predicted[shown], s=12, color=MEASURED, alpha=_alpha(len(shown)), linewidths=0, label=_rows(true, shown)
    )
    axes.set_xlim(limits)
    axes.set_ylim(limits)
    axes.set_aspect("equal")
    axes.set_xlabel(f"true {label}")
    axes.set_ylabel(f"predicted {label}")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(loc="upper left", frameon=False)
    _plain(axes)
    return figure


def residuals_figure(predicted: Floats, true: Floats, label: str, title: str = "Errors") -> Figure:
    """Draw the distribution of (predicted - true) of a regression, [rows] each."""
    errors = predicted - true
    figure, axes = _figure(5.4, 4.0)
    axes.hist(errors, bins=min(60, max(10, int(np.sqrt(len(errors))))), color=MEASURED, alpha=0.8)
    axes.axvline(0.0, color=REFERENCE, linestyle="--", linewidth=1)
    axes.set_xlabel(f"predicted - true {label}")
    axes.set_ylabel("rows")
    spread = f"mean {errors.mean():.4g}, standard deviation {errors.std():.4g}" if len(errors) else "no rows"
    axes.set_title(f"{title}\n{spread}", loc="left", fontsize=11)
    _plain(axes)
    return figure


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    # Not through pyplot: its registry of open figures is global, and evaluation may run in a thread.
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _cumulated(probability: Floats, target: Counts) -> tuple[Floats, Floats]:
    """Counts of positives and of negatives among the rows at or above each distinct probability, from none to all."""
    order = np.argsort(-probability, kind="stable")
    ranked, hits = probability[order], target[order].astype(np.float64)
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1) if len(ranked) else np.empty(0, dtype=np.int64)
    positives = np.cumsum(hits)[ends]
    negatives = np.cumsum(1.0 - hits)[ends]
    return np.concatenate([[0.0], positives]), np.concatenate([[0.0], negatives])


def _unit_square(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, loc="left", fontsize=11)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.grid(color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)


def _sample(rows: int) -> NDArray[np.int64]:
    return np.linspace(0, rows - 1, min(rows, MAX_POINTS)).astype(np.int64)


def _alpha(points: int) -> float:
    return float(np.clip(60.0 / np.sqrt(max(points, 1)), 0.15, 0.9))


def _rows(all_rows: Floats, shown: NDArray[np.int64]) -> str:
    return f"{len(shown):,} rows" if len(shown) == len(all_rows) else f"{len(shown):,} of {len(all_rows):,} rows"


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _fits(labels: Sequence[str]) -> bool:
    return max((len(label) for label in labels), default=0) <= 3


def _compact(count: int) -> str:
    if count < 10_000:
        return str(count)
    return f"{count / 1000:.0f}k" if count < 1_000_000 else f"{count / 1e6:.1f}M"
