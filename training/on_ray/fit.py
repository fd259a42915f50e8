"""Which thread of the driver waits while Ray trains, and how does it end the training?"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from penstock.training.on_ray.mailbox import MailboxHandle
from penstock.training.on_ray.worker import RankResult

__all__ = ["KILL_GRACE_S", "Fit"]

KILL_GRACE_S = 20.0
"""How long Ray may take to notice that the workers are gone."""


class Fit(threading.Thread, ABC):
    """One attempt in Ray's hands.

    Args:
        mailbox: where it talks with the driver.

    Attributes:
        over: set unless it runs. After a signal's exception in `join`, `is_alive` is False of a thread that lives.
        result: what rank 0 returned; None where there is none.
        error: what was raised instead, for the thread that waits to judge.
    """

    def __init__(self, mailbox: MailboxHandle) -> None:
        super().__init__(name="penstock-fit", daemon=True)
        self._mailbox = mailbox
        self.result: RankResult | None = None
        self.error: Exception | None = None
        self.over = threading.Event()
        self.over.set()

    def start(self) -> None:
        """Begin."""
        self.over.clear()
        super().start()

    def run(self) -> None:
        """Train to the end and keep the result or the error."""
        try:
            self.result = self._train()
        except Exception as error:  # Ray's, or whatever a rank raised: the thread that waits judges it
            self.error = error
        finally:
            self.over.set()

    @abstractmethod
    def _train(self) -> RankResult:
        """Blocks until the end."""

    @abstractmethod
    def kill_workers(self) -> None:
        """Kill the workers that run now; those that Ray starts in their place find that a stop was asked for."""

    @abstractmethod
    def end(self) -> None:
        """End all that Ray does for this attempt, unless it is over, and wait for that."""
