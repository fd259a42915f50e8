"""How do the training workers and the driver exchange events and a stop while Ray Train runs?

Ray Train's own reports arrive once per poll and are a barrier over all ranks; a chart of every step and a prompt stop need
neither. One small actor on the driver's node holds a mailbox for each attempt: rank 0 puts events and reads "stop", the driver
takes the events.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.redact import redact_text
from penstock.training.events import Event, Failure, WorkersLost, WorkersStarting, WorkerStarted

__all__ = ["Mailbox", "MailboxHandle", "Mailboxes", "RayMailboxClient", "mailboxes", "open_mailbox", "say_in_log"]


UNREACHABLE_WAIT_S = 0.5
"""Between two tries to reach a mailbox whose node does not answer."""


class Mailbox:
    """A list of events, a stop flag, and which workers are alive. Holds nothing that matters after the attempt."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stop = False
        self._group = -1
        """Worker groups that Ray Train has asked for, less one: the number of the newest."""
        self._losses = 0
        self._workers: dict[int, Any] = {}
        self._places: dict[int, str] = {}
        """Rank -> its process, for a message, of the ranks that have not reported a failure."""
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
        """Add events of a rank; the answer says whether the driver wants training to stop, and whether the rank was replaced.

        Args:
            restart: the sender's worker group; events of one that was replaced are dropped.
            sender: whose delivery it is.
            number: counts the sender's deliveries from 1. One that came already is not added twice.
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
        """Note that workers are asked for. Called by Ray Train's controller, or by a task that is the only rank."""
        self._group += 1
        self._events.append(WorkersStarting())

    def lost(self, ranks: list[int]) -> None:
        """These ranks are given up, and all are started again. From the same as `starting`."""
        self._losses += 1
        # Ranks that reported why they end are a consequence of those that ended without a word, as a rule.
        silent = [self._places[rank] for rank in ranks if rank in self._places]
        who = ", ".join(silent or [f"rank {rank}" for rank in ranks])
        self._events.append(WorkersLost(ranks=tuple(ranks), restart=self._losses, who=who))

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
        """Actor handles of the ranks that started last; none of a task."""
        return [worker for worker in self._workers.values() if worker is not None]


class Mailboxes:
    """The actor: the mailboxes of the attempts that a driver makes, one after the other or some at once."""

    def __init__(self) -> None:
        self._mailboxes: dict[str, Mailbox] = {}
        self._closed: set[str] = set()

    def call(self, name: str, method: str, *given: Any) -> Any:
        """The answer of a mailbox, which begins with its first call. One that is closed answers that training is to stop."""
        mailbox = self._mailboxes.get(name) or Mailbox()
        if name in self._closed:
            mailbox.stop()
        else:
            self._mailboxes[name] = mailbox
        return getattr(mailbox, method)(*given)

    def close(self, name: str) -> None:
        """Forget what a mailbox holds."""
        self._mailboxes.pop(name, None)
        self._closed.add(name)


@dataclass(frozen=True)
class MailboxHandle:
    """A mailbox from any process of the cluster: the actor's handle, and the mailbox's name there."""

    actor: Any
    name: str

    def call(self, method: str, *given: Any) -> Any:
        """Call a method of the `Mailbox`. Returns a reference of Ray's to the answer."""
        return self.actor.call.remote(self.name, method, *given)

    def close(self) -> None:
        """The attempt is over."""
        self.actor.close.remote(self.name)


def open_mailbox() -> MailboxHandle:
    """A new mailbox for an attempt. Its actor is on this process's node, takes no CPU and dies with the driver."""
    runtime = ray.get_runtime_context()
    return MailboxHandle(mailboxes(runtime.get_session_name(), runtime.get_job_id(), runtime.get_node_id()), uuid.uuid4().hex)


@functools.lru_cache(maxsize=1)
def mailboxes(_session: str, _job: str, node: str) -> Any:
    """The actor of this driver, until its `cache_clear`: its start takes most of a second, and a sweep has many attempts."""
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(Mailboxes).options(num_cpus=0, scheduling_strategy=strategy).remote()  # type: ignore[attr-defined]


def say_in_log(text: str) -> None:
    """Put a line into the file that Ray keeps of this worker's stderr, and nowhere else."""
    assert sys.__stderr__ is not None
    print(f"penstock: {redact_text(text)}", file=sys.__stderr__, flush=True)


class RayMailboxClient:
    """A `MailboxClient` of a rank.

    Args:
        restart: how many worker groups of this attempt were before this rank's.
    """

    def __init__(self, handle: MailboxHandle, restart: int) -> None:
        self._handle = handle
        self._restart = restart
        self._sender = uuid.uuid4().hex
        self._number = 0

    def put(self, events: list[Event]) -> bool:
        """Deliver events, in order. A mailbox that is gone means that the driver is gone: save and stop.

        While the driver's node cannot be reached, which is no end of it, the delivery is repeated: Ray calls the mailbox dead
        in the end, or ends this worker. The process ends itself if its worker group was replaced while the machine was cut
        off: the training thread may hang in a collective with ranks that are gone, and has nothing left to do.
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
                say_in_log(f"this worker (restart {self._restart}) was replaced and ends")
                os._exit(1)
            return bool(answer["stop"])
