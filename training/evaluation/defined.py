"""How is a torchmetrics metric made, and when do the rows leave its value undefined?

torchmetrics answers 0 where a metric is not defined, as the area under the curve of rows that are all of one class. A perfect
model would then seem to fail: here the value is not a number, and the metric says what the rows lack.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = ["Needs", "mean_of_classes", "metric_library", "new_metric", "what_is_missing"]


Needs = Literal["two values", "class 1"]
"""What the labels must show for the metric to be defined."""


def metric_library() -> Any:
    """torchmetrics, loaded when the first metric is made: it takes half a second of every process that measures.

    Where transformers is installed it brings that too, from whichever of its modules is imported, and has no switch for it.
    """
    with _signal_when_used():
        import torchmetrics.classification

    return torchmetrics


@contextlib.contextmanager
def _signal_when_used() -> Iterator[None]:
    """Let `scipy.signal`, which takes 1.1 s, load only when something of it is used.

    torchmetrics loads it to give it the name `hamming`, which a library that nothing here needs looks for.
    """
    if "scipy.signal" in sys.modules:
        yield
        return
    later = _Later("scipy.signal")
    later.__dict__["hamming"] = None
    sys.modules["scipy.signal"] = later
    try:
        yield
    finally:
        later.leave()


class _Later(ModuleType):
    """Stands for a module until another thread, or an import that needs more than its name, asks for something of it."""

    def leave(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)


def new_metric(kind: str, *arguments: Any, needs: Needs | None = None, labels: int = 1, **options: Any) -> Metric:
    """A metric of torchmetrics by the name of its class.

    Args:
        needs: what the labels must show; else the value is not a number. None: defined of any rows.
        labels: how many a row has. A metric that has a value for each is the mean over those that it is defined of.
    """
    made: Metric = _named(kind)(*arguments, **options) if needs is None else _defined(kind, needs)(labels, arguments, options)
    return made


def mean_of_classes(kind: str, classes: int, needs: Needs | None = None, **options: Any) -> Metric:
    """A metric of each class, as the mean over the classes that have rows."""
    return new_metric(f"MeanOf{kind}", classes, needs=needs, average="none", **options)


def what_is_missing(metric: Metric) -> tuple[Needs, float] | None:
    """Why the value computed last is not a number: what it needs, and the one value that the labels have, or the highest."""
    missing: tuple[Needs, float] | None = getattr(metric, "missing", None)
    return missing


def _named(kind: str) -> Any:
    if kind.startswith("MeanOf"):
        return _mean_kind(kind.removeprefix("MeanOf"))
    library = metric_library()
    return getattr(library.classification, kind, None) or getattr(library, kind)


@cache
def _mean_kind(kind: str) -> Any:
    base: Any = _named(kind)
    from torchmetrics.utilities import dim_zero_cat

    class MeanOfClasses(base):  # type: ignore[misc]
        """torchmetrics takes 0 for a class that no row has."""

        def compute(self) -> Tensor:
            """The mean, a scalar; 0 of no rows."""
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about those classes
                values: Tensor = super().compute()
            if kind == "MulticlassAccuracy":
                rows = self.tp + self.fn
            elif self.thresholds is not None:
                rows = self.confmat[0, :, 1].sum(-1)
            else:
                rows = torch.bincount(dim_zero_cat(self.target), minlength=len(values))
            return values[rows > 0].mean() if bool(rows.any()) else values.new_zeros(())

    return MeanOfClasses


@cache
def _defined(kind: str, needs: Needs) -> Any:
    base: Any = _named(kind)

    class WhereDefined(base):  # type: ignore[misc]
        """The metric with the lowest and the highest value of each label, over the rows of all ranks."""

        lowest: Tensor
        highest: Tensor
        missing: tuple[Needs, float] | None = None

        def __init__(self, labels: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            super().__init__(*arguments, **options)
            self.add_state("lowest", torch.full((labels,), float("inf")), dist_reduce_fx="min")
            self.add_state("highest", torch.full((labels,), float("-inf")), dist_reduce_fx="max")

        def update(self, preds: Tensor, target: Tensor) -> None:
            super().update(preds, target)
            if len(target):
                of_label = target.reshape(len(target), -1).to(self.lowest.dtype)
                self.lowest = torch.minimum(self.lowest, of_label.amin(0))
                self.highest = torch.maximum(self.highest, of_label.amax(0))

        def compute(self) -> Tensor:
            """The value, a scalar; not a number where no label shows what it needs."""
            defined = self.highest > self.lowest if needs == "two values" else self.highest >= 1
            self.missing = None if bool(defined.any()) else (needs, float(self.highest.max()))
            if self.missing is not None:
                return torch.full((), float("nan"), device=defined.device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # about the labels that it is not defined of
                values: Tensor = super().compute()
            return values[defined].mean() if values.numel() > 1 else values.reshape(())

    return WhereDefined
