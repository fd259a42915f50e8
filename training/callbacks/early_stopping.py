"""When has training learned enough? When a validation metric has not become better for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from penstock.errors import SpecError, TrainingError
from penstock.messages import did_you_mean
from penstock.training.callbacks.callback import Training
from penstock.training.spec import mode_problem

__all__ = ["EARLY_STOPPING", "EarlyStopping"]

EARLY_STOPPING = "early_stopping"
"""Its name in `train.callbacks`."""


class EarlyStopping:
    """Ends training once a metric has not improved for some validations in a row.

    Args:
        metric: as a validation names it: `val/loss`.
        patience: validations without an improvement after which training ends.
        mode: whether lower or higher is better.
        min_delta: what counts as an improvement must be better by more than this.
    """

    def __init__(
        self, metric: str = "val/loss", patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        if mode not in ("min", "max") or not isinstance(patience, int) or patience < 1 or min_delta < 0:
            raise SpecError(
                f"train.callbacks: early_stopping got patience {patience!r}, mode {mode!r}, min_delta {min_delta!r}",
                next_step="patience is 1 or more, mode is min or max, min_delta is 0 or more",
            )
        if problem := mode_problem(metric, mode):
            raise SpecError(f"train.callbacks: early_stopping: {problem}", next_step="correct its mode in the pipeline file")
        self.metric, self._patience, self._sign, self._min_delta = metric, patience, 1 if mode == "min" else -1, min_delta
        self._best: float | None = None
        self._since = 0

    def start(self, training: Training) -> None:
        """Refuse to wait for a validation that never comes.

        Raises:
            SpecError: the validation split holds no rows.
        """
        if not training.validates:
            raise SpecError(
                f"train.callbacks: early_stopping watches {self.metric!r}, and the validation split holds no rows",
                next_step="give the data a validation split: data.validation",
            )

    def validation(self, training: Training, metrics: Mapping[str, float]) -> None:
        """Compare with the best so far.

        Raises:
            TrainingError: validation does not measure the metric.
        """
        if self.metric not in metrics:
            raise TrainingError(
                f"train.callbacks: early_stopping watches {self.metric!r}, which validation does not measure"
                + did_you_mean(self.metric, metrics),
                next_step=f"choose one of {', '.join(sorted(metrics))}",
            )
        value = self._sign * metrics[self.metric]
        if self._best is None or value < self._best - self._min_delta or not math.isfinite(self._best):
            self._best, self._since = value, 0
            return
        self._since += 1
        if self._since >= self._patience:
            best = self._sign * self._best
            training.stop(f"early_stopping: {self.metric} has not been better than {best:.4g} for {self._since} validations")

    def state_dict(self) -> dict[str, Any]:
        """The best, and how long ago it was."""
        return {"best": self._best, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there; a run that was ended and goes on, since a setting has changed, is given `patience` anew."""
        self._best, self._since = state["best"], state["since"] if state["since"] < self._patience else 0
