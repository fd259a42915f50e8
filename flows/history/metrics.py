"""By which metric is a run judged, and in which order are metrics shown?"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.tasks.records.ledger import Run
from penstock.training.spec import HIGHER_IS_BETTER, LOWER_IS_BETTER, BestSpec

__all__ = ["better_sign", "is_better", "main_metric", "sort_by_split"]


def main_metric(run: Run) -> str | None:
    """Return the metric of the best checkpoint, on the test rows if it was measured there, else the first held-out metric."""
    metrics = run.result.get("metrics", {})
    chosen = ((run.spec.get("train", {}).get("checkpoint") or {}).get("best") or {}).get("metric")
    wanted = [
        f"test/{str(chosen).rpartition('/')[2]}",
        chosen,
        *(f"{split}/{name}" for split in ("test", "val") for name in ("accuracy", "r2", "loss")),
    ]
    return next((name for name in wanted if name in metrics), next(iter(sorted(metrics)), None))


def better_sign(run: Run, metric: str) -> int:
    """Return 1 if more is better, -1 if less is, and 0 if that is not known, as of a value that user code logs."""
    best = (run.spec.get("train", {}).get("checkpoint") or {}).get("best") or {}
    if str(best.get("metric")).rpartition("/")[2] == metric.rpartition("/")[2]:
        return 1 if BestSpec.model_validate(best).mode == "max" else -1
    name = metric.rpartition("/")[2]
    return -1 if name in LOWER_IS_BETTER else int(name in HIGHER_IS_BETTER)


def is_better(run: Run, metric: str, difference: float) -> bool | None:
    """Return whether a metric that differs by so much is better; None if it is equal, or the direction is not known."""
    better = better_sign(run, metric) * difference
    return better > 0 if better else None


def sort_by_split(metrics: Iterable[str]) -> list[str]:
    """Sort names of metrics: test first, train last."""
    splits = ("test/", "val/", "train/")
    return sorted(metrics, key=lambda name: (next((i for i, s in enumerate(splits) if name.startswith(s)), 9), name))
