"""Which failures does Ray Train not repeat? Those that a restart would only meet again.

A module of its own, and a small one: Ray Train's controller imports it before it starts a worker, and everybody waits for that.
"""

from __future__ import annotations

from typing import Any

import ray.train

from penstock.errors import PenstockError

__all__ = ["NoRetryOfUserErrors"]


class NoRetryOfUserErrors(ray.train.UserCallback):
    """Ends the run when a worker failed with an error that a restart would only repeat. Runs in Ray Train's controller.

    Ray Train retries every exception alike; what a callback raises, it does not retry.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise the first such error."""
        for _, error in sorted(worker_exceptions.items()):
            if isinstance(error, PenstockError):
                raise error
