"""What does training wait for while no step is done: a head that does not answer, workers that have not started, a slow write?

Lines come rarely, for a step may rightly take a minute.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

import ray
from ray._private.state import state as ray_state

from penstock.errors import TrainingError
from penstock.messages import capped
from penstock.redact import redact_text
from penstock.training.events import (
    CheckpointCommitted,
    Event,
    Handlers,
    Notice,
    Saving,
    TrainProgress,
    WorkersStarting,
    WorkerStarted,
)
from penstock.training.on_ray.resources import missing_for_workers
from penstock.training.on_ray.stacks import Asked, Process, ask_ranks
from penstock.training.spec import TrainSpec

__all__ = ["Cluster", "Watcher"]

FIRST_S = 15.0
"""Seconds without a step until the first line, or twice the longest step so far; each later one takes twice as long."""

MOST_OTHERS = 3

MOST_RANKS = 8
"""A line shows the places of so many ranks; those that do not wait for others come first."""

CONNECT_S = 2.0
"""How long the head may take to accept a connection."""


class Cluster:
    """The cluster that this process is connected to."""

    def head_answers(self) -> bool:
        """Whether Ray's head accepts a connection. Ray's own calls wait for a silent head, and then end the process."""
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        except OSError:
            return False
        return True

    def nodes(self) -> list[Mapping[str, float]]:
        """Return the resources of each node that Ray calls alive. The head must answer."""
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def free(self) -> Mapping[str, float]:
        """Return the resources of all nodes together that are free now."""
        return ray.available_resources()  # type: ignore[no-any-return]

    def others(self) -> list[str]:
        """Return the other drivers that use the cluster now: the command, its pid and its address."""
        own = ray.get_runtime_context().get_job_id()
        return [
            f"{redact_text(job['Entrypoint'])} (pid {job['DriverPid']} on {job['DriverIPAddress']})"
            for job in ray_state.job_table()
            if not job["IsDead"] and job["JobID"] != own
        ]


class Watcher:
    """Follows the events of an attempt; `due` returns a line when no step is done for long.

    Args:
        spec: the `train` section.
        need: CPU and GPU of one worker.
        cluster: Ray's view of the cluster.
        clock: monotonic seconds.
        ask: requests the ranks' stacks.

    Attributes:
        handlers: of the events that it follows.
    """

    def __init__(
        self,
        spec: TrainSpec,
        need: Mapping[str, float],
        cluster: Cluster | None = None,
        clock: Callable[[], float] = time.monotonic,
        ask: Callable[[Mapping[int, Process]], Asked] = ask_ranks,
    ) -> None:
        self._spec, self._need, self._cluster, self._clock, self._ask = spec, need, cluster or Cluster(), clock, ask
        self._up: dict[int, Process] = {}
        """Started processes of the newest worker group, by rank."""
        self._asked: tuple[float, Mapping[int, Process], Asked] | None = None
        """Seconds without a step at the request for the ranks' stacks, their processes, and the answers."""
        self._step: int | None = None
        self._saving: int | None = None
        self._longest_s = 0.0
        """Longest time between two steps so far, as this process saw it."""
        self._next_s = self._ask_s = 0.0
        self._begin()
        self.handlers: Handlers = {
            WorkersStarting: self._starting,
            WorkerStarted: self._started,
            TrainProgress: self._stepped,
            Saving: self._save,
            CheckpointCommitted: self._committed,
        }

    def due(self) -> list[Event]:
        """Return the lines that are due.

        Raises:
            TrainingError: not all workers started within `train.wait_s`.
        """
        news: list[Event] = []
        still_s, starting = self._clock() - self._since_s, not self._all_up
        if starting and still_s > self._spec.wait_s:
            raise self._start_timeout()
        if self._asked is not None or (not starting and still_s >= self._ask_s):
            news += self._stalled(still_s)
        if still_s >= self._next_s:
            self._next_s = 2 * still_s
            news.append(Notice(message=self._start(still_s) if starting else self._training(still_s)))
        return news

    @property
    def _all_up(self) -> bool:
        return len(self._up) == self._spec.workers

    def _begin(self) -> None:
        """Count from now. A step that takes twice as long as the longest one so far is worth a line."""
        self._since_s = self._clock()
        self._next_s = max(FIRST_S, 2 * self._longest_s)
        self._ask_s = max(self._spec.stall_s, 2 * self._longest_s)

    def _starting(self, _event: WorkersStarting) -> None:
        if self._all_up:  # else Ray Train repeats its request: the same wait goes on
            self._begin()
        self._up, self._step, self._saving = {}, None, None

    def _started(self, event: WorkerStarted) -> None:
        self._up[event.rank] = Process(event.node, event.host, event.pid)
        if self._all_up:
            self._begin()

    def _save(self, event: Saving) -> None:
        self._saving = event.step

    def _committed(self, event: CheckpointCommitted) -> None:
        if event.step == self._saving:
            self._saving = None

    def _stepped(self, event: TrainProgress) -> None:
        if self._step is not None:
            self._longest_s = max(self._longest_s, self._clock() - self._since_s)
        self._step, self._asked = event.step, None
        self._begin()

    def _start(self, still_s: float) -> str:
        waiting = f"waiting for the workers for {still_s:.0f} s"
        if not self._cluster.head_answers():
            return f"{waiting}; the head of the Ray cluster does not answer"
        left_s = max(0.0, self._spec.wait_s - still_s)
        return (
            f"{waiting}; {self._lacking()}. The command ends in {left_s:.0f} s if they do not start "
            f"(train.wait_s: {self._spec.wait_s:g}); the same command continues"
        )

    def _lacking(self) -> str:
        """Describe what the start lacks: CPUs or GPUs that are not there, or not free."""
        nodes = self._cluster.nodes()
        lacks = missing_for_workers(self._spec.workers, self._need, nodes)
        if lacks is not None:
            return f"it lacks {lacks}"
        free, others = self._cluster.free(), self._cluster.others()
        there = {name: sum(node.get(name, 0.0) for node in nodes) for name in self._need}
        parts = [
            f"{len(self._up)} of {self._spec.workers} have started",
            *(f"{free.get(name, 0.0):g} of the cluster's {there[name]:g} {name}s are free" for name in self._need),
            f"others use the cluster: {', '.join(capped(others, MOST_OTHERS))}" if others else "",
        ]
        return "; ".join(filter(None, parts))

    def _training(self, still_s: float) -> str:
        idle = f"no step for {still_s:.0f} s"
        if not self._cluster.head_answers():
            return f"{idle}; the head of the Ray cluster does not answer"
        if self._saving is not None:
            return f"{idle}; the checkpoint of step {self._saving:,} is being written"
        return f"{idle}; " + (f"the last one was {self._step:,}" if self._step is not None else "all workers have started")

    def _stalled(self, still_s: float) -> list[Event]:
        """Request every rank's stack once `train.stall_s` has passed, and again after twice as long."""
        if self._asked is None:
            self._ask_s = 2 * still_s
            if not self._cluster.head_answers():
                return []
            self._asked = still_s, dict(self._up), self._ask(self._up)
        still_s, processes, asked = self._asked
        places = asked()
        if places is None:
            return []
        self._asked = None
        several = len({process.host for process in processes.values()}) > 1
        texts: dict[bool, list[str]] = {False: [], True: []}
        for rank, place in sorted(places.items()):
            texts[place.waits].append(f"rank {rank}{f' on {processes[rank].host}' if several else ''} {place.text}")
        blamed = "; ".join(capped(texts[False], MOST_RANKS))
        message = f"no step for {still_s:.0f} s: " + "; ".join(capped([*texts[False], *texts[True]], MOST_RANKS))
        return [Notice(message=message, blamed=blamed)]

    def _start_timeout(self) -> TrainingError:
        lacks = self._lacking() if self._cluster.head_answers() else "the head of the Ray cluster does not answer"
        return TrainingError(
            f"the workers could not start within {self._spec.wait_s:g} s (train.wait_s): {lacks}",
            next_step="add the nodes, or lower train.workers; then run the same command, which continues from the newest "
            "checkpoint",
        )
