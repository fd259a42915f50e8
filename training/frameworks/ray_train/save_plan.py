"""When does a framework's own trainer save and validate? When `train.checkpoint` and `train.validate_every_steps` say so."""

from __future__ import annotations

import time

from penstock.training.frameworks.ray_train.session import Session
from penstock.training.job import TrainJob
from penstock.training.ranks import Group

__all__ = ["REPORT_EVERY", "SavePlan"]

REPORT_EVERY = 10
"""Steps between points of what is measured while training."""


class SavePlan:
    """One rank's. `due_*` are collectives: the first rank's clock decides for all."""

    def __init__(self, job: TrainJob, group: Group, session: Session) -> None:
        self._spec, self._group, self._session = job.spec, group, session
        self._saved_s = time.monotonic()

    def validates(self, step: int) -> bool:
        """Whether to validate in the middle of an epoch."""
        return _is_every(self._spec.validate_every_steps, step)

    def due_in_epoch(self, step: int) -> bool:
        """Whether to save after a step that does not end an epoch."""
        checkpoint = self._spec.checkpoint
        over = checkpoint.every_s is not None and time.monotonic() - self._saved_s >= checkpoint.every_s
        candidate = checkpoint.best is not None and self.validates(step)
        planned = _is_every(checkpoint.every_steps, step)
        return bool(self._group.from_first(planned or candidate or over or self._session.stop_wanted))

    def due_at_epochs_end(self, *, last: bool) -> bool:
        """Whether to save at the end of an epoch; `last` is that of training."""
        checkpoint = self._spec.checkpoint
        wanted = checkpoint.every_epoch or checkpoint.best is not None or last
        return bool(self._group.from_first(wanted or self._session.stop_wanted))

    def saved(self) -> None:
        """A checkpoint was handed over just now."""
        self._saved_s = time.monotonic()


def _is_every(steps: int | None, step: int) -> bool:
    return steps is not None and step % steps == 0
