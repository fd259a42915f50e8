"""How do the training workers and the driver talk while Ray Train runs?

Ray Train's own reports arrive once per poll and are a barrier over all ranks; a chart of every step and a prompt stop need
neither. One small actor on the driver's node is the mailbox: rank 0 puts events and reads "stop", the driver takes the events.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.training.events import Event, WorkerStarted

__all__ = ["Mailbox", "RayMailboxClient", "start_mailbox"]


UNREACHABLE_WAIT_S = 0.5
"""Between two tries to reach a mailbox whose node does not answer."""


class Mailbox:
    """The actor: a list of events, a stop flag, and which workers are alive. Holds nothing that matters after the attempt."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stop = False
        self._starts: dict[int, int] = {}
        self._workers: dict[int, Any] = {}
        self._controller: Any = None
        self._delivered: dict[str, int] = {}

    def start(self, rank: int, host: str, pid: int, worker: Any) -> dict[str, Any]:
        """Register a rank's process and its actor handle."""
        restart = self._starts.get(rank, 0)
        self._starts[rank] = restart + 1
        self._workers[rank] = worker
        self._events.append(WorkerStarted(rank=rank, host=host, pid=pid, restart=restart))
        return {"stop": self._stop, "restart": restart}

    def put(self, events: list[Event], sender: str, number: int) -> dict[str, bool]:
        """Add events of a rank; the answer says whether the driver wants training to stop.

        Args:
            sender: whose delivery it is.
            number: counts the sender's deliveries from 1. One that came already is not added twice.
        """
        if number > self._delivered.get(sender, 0):
            self._delivered[sender] = number
            self._events.extend(events)
        return {"stop": self._stop}

    def take(self) -> list[Event]:
        """Hand over the events since the last call. Driver only."""
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
        """Actor handles of the ranks that started last."""
        return list(self._workers.values())


def start_mailbox() -> Any:
    """Start the actor on this process's node; it takes no CPU and dies with the driver. Returns its handle."""
    here = ray.get_runtime_context().get_node_id()
    strategy = NodeAffinitySchedulingStrategy(node_id=here, soft=False)
    return ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=strategy).remote()  # type: ignore[attr-defined]


class RayMailboxClient:
    """A `MailboxClient` over the actor's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._sender = uuid.uuid4().hex
        self._number = 0

    def put(self, events: list[Event]) -> bool:
        """Deliver events, in order. A mailbox that is gone means that the driver is gone: save and stop.

        While the driver's node cannot be reached, which is no end of it, the delivery is repeated: Ray calls the mailbox dead
        in the end, or ends this worker.
        """
        self._number += 1
        while True:
            try:
                return bool(ray.get(self._handle.put.remote(events, self._sender, self._number), timeout=60)["stop"])
            except ray.exceptions.GetTimeoutError:
                return False  # a busy machine; Ray still delivers the call, before any later one
            except ray.exceptions.ActorUnavailableError:  # whether the call has arrived is not known
                time.sleep(UNREACHABLE_WAIT_S)
            except ray.exceptions.RayActorError:
                return True
