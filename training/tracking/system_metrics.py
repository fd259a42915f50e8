"""How busy was the machine while it trained? A thread asks every few seconds and hands the answer on as points."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from penstock.training.events import Point

__all__ = ["Sampler"]


_log = logging.getLogger("penstock.tracking")


class Sampler:
    """Samples until stopped. MLflow's own monitor thread ends at the first failed request; this one only fills a queue."""

    def __init__(
        self,
        sample: Callable[[], Mapping[str, float]],
        emit: Callable[[list[Point]], None],
        *,
        first_step: int,
        interval_s: float,
    ) -> None:
        """Samples are counted from `first_step` on, one more than the last one the server holds."""
        self._sample = sample
        self._emit = emit
        self._step = first_step
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-system-metrics", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; no point is made afterwards."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                values = dict(self._sample())
            except Exception as error:  # a chart of the machine is no reason to end a run
                _log.warning("no system metrics from here on: %s", error)
                return
            self._emit([Point(time.time_ns() // 1_000_000, self._step, values)])
            self._step += 1
