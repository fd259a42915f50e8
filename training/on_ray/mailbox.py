"""How do the training workers and the driver exchange events and a stop while Ray Train runs?

Ray Train's own reports arrive once per poll and are a barrier over all ranks. Instead, a small actor on the driver's node is
the mailbox of an attempt: rank 0 puts events and reads "stop", the driver takes the events.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.training.events import Event, Failure, WorkersLost, WorkersStarting, WorkerStarted

__all__ = ["Mailbox", "MailboxHandle", "RayMailboxClient", "open_mailbox"]

UNREACHABLE_WAIT_S = 0.5
"""Time between two tries to reach a mailbox whose node does not answer."""


class Mailbox:
    """A list of events, a stop flag, and the workers that are alive. Nothing in it matters after the attempt.

    Args:
        groups: worker groups of the attempt before.
    """

    def __init__(self, groups: int = 0) -> None:
        self._events: list[Event] = []
        self._stop = False
        self._group = groups - 1
        """Number of the attempt's newest worker group, from 0."""
        self._losses = 0
        self._workers: dict[int, Any] = {}
        self._places: dict[int, str] = {}
        """Rank -> host and pid for a message, without the ranks that have reported a failure."""
        self._controller: Any = None
        self._delivered: dict[str, int] = {}

    def start(self, rank: int, host: str, pid: int, worker: Any, node: str = "") -> dict[str, Any]:
        """Register a rank's process and its actor handle."""
        restart = self._group
        self._workers[rank] = worker
        self._places[rank] = f"rank {rank} on {host} (pid {pid})"
        self._events.append(WorkerStarted(rank=rank, host=host, pid=pid, restart=restart, node=node))
        return {"stop": self._stop, "restart": restart}

    def put(self, events: list[Event], restart: int, sender: str, number: int) -> dict[str, bool]:
        """Add events of a rank; return whether the driver wants training to stop, and whether the rank was replaced.

        Args:
            restart: the sender's worker group; events of one that was replaced are dropped.
            sender: identifies the rank's process.
            number: of the sender's delivery, from 1. One that has arrived already is not added twice.
        """
        replaced = restart < self._group
        if not replaced and number > self._delivered.get(sender, 0):
            self._delivered[sender] = number
            self._events.extend(events)
            for event in events:
                if isinstance(event, Failure):
                    self._places.pop(event.rank, None)
        return {"stop": self._stop, "replaced": replaced}

    def starting(self) -> None:
        """Note that a worker group is being started. Called by Ray Train's controller, or by a task that is the only rank."""
        self._group += 1
        self._events.append(WorkersStarting())

    def lost(self, ranks: list[int]) -> None:
        """Note that these ranks are lost, and all are started again. Same caller as `starting`."""
        self._losses += 1
        # As a rule, ranks that reported an error failed because of those that ended without one.
        silent = [self._places[rank] for rank in ranks if rank in self._places]
        who = ", ".join(silent or [f"rank {rank}" for rank in ranks])
        self._events.append(WorkersLost(ranks=tuple(ranks), restart=self._losses, who=who))

    def take(self) -> list[Event]:
        """Return the events since the last call. Driver only."""
        events, self._events = self._events, []
        return events

    def stop(self) -> None:
        """Ask the workers to save and stop. Driver only."""
        self._stop = True

    def controlled_by(self, controller: Any) -> None:
        """Register the actor handle of Ray Train's controller."""
        self._controller = controller

    def controller(self) -> Any:
        """Actor handle of Ray Train's controller; None before it has started."""
        return self._controller

    def workers(self) -> list[Any]:
        """Actor handles of the ranks that started last; none of a task."""
        return [worker for worker in self._workers.values() if worker is not None]


@dataclass(frozen=True)
class MailboxHandle:
    """Reaches a mailbox from any process of the cluster."""

    actor: Any

    def call(self, method: str, *given: Any) -> Any:
        """Call a method of the `Mailbox`. Returns Ray's reference to the answer."""
        return getattr(self.actor, method).remote(*given)

    def close(self) -> None:
        """End the mailbox: the attempt is over, and a rank that still calls it reads that it must stop."""
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self.actor)


def open_mailbox(groups: int) -> MailboxHandle:
    """Make the mailbox of an attempt. Its actor is on this process's node, takes no CPU and dies with the driver."""
    strategy = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
    return MailboxHandle(ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=strategy).remote(groups))  # type: ignore[attr-defined]


class RayMailboxClient:
    """A `MailboxClient` of a rank.

    Args:
        restart: number of worker groups of this attempt before this rank's.
    """

    def __init__(self, handle: MailboxHandle, restart: int) -> None:
        self._handle = handle
        self._restart = restart
        self._sender = uuid.uuid4().hex
        self._number = 0

    def put(self, events: list[Event]) -> bool:
        """Deliver events, in order. Returns True (save and stop) if the mailbox is dead, and so the driver.

        While the driver's node cannot be reached, the delivery is repeated, until Ray calls the mailbox dead or ends this
        worker. The process ends itself if its worker group was replaced while the machine was cut off: the training thread may
        hang in a collective with ranks that are gone.
        """
        self._number += 1
        while True:
            try:
                call = self._handle.call("put", events, self._restart, self._sender, self._number)
                answer = ray.get(call, timeout=60)
            except ray.exceptions.GetTimeoutError:
                return False  # a busy machine; Ray still delivers the call, before any later one
            except ray.exceptions.ActorUnavailableError:  # whether the call has arrived is not known
                time.sleep(UNREACHABLE_WAIT_S)
                continue
            except ray.exceptions.RayActorError:
                return True
            if answer["replaced"]:
                # Into Ray's log of this worker: its streams may belong to a driver that is out of reach.
                print(f"penstock: this worker (restart {self._restart}) was replaced and ends", file=sys.__stderr__, flush=True)
                os._exit(1)
            return bool(answer["stop"])
