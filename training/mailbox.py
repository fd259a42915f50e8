"""How do the training workers and the driver talk while Ray Train runs?

Ray Train's own reports arrive once per poll and are a barrier over all ranks; a chart of every step and a prompt stop need
neither. One small actor on the driver's node is the mailbox: rank 0 puts events and reads "stop", the driver takes the events.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import ray
from pydantic import ConfigDict
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.config import Section
from penstock.training.journal import Point

__all__ = [
    "CheckpointCommitted",
    "Courier",
    "Event",
    "Failure",
    "Mailbox",
    "MailboxClient",
    "Point",
    "Progress",
    "RayMailboxClient",
    "Resumed",
    "Saving",
    "StopAsked",
    "Warned",
    "WorkerStarted",
    "now_ms",
    "start_mailbox",
]

PUT_INTERVAL_S = 0.3
"""How often rank 0 delivers events and learns about a stop."""


class Progress(Section):
    """How far training is, a few times a second."""

    step: int
    total_steps: int | None
    epoch: int
    rows_per_s: float


class CheckpointCommitted(Section):
    """A checkpoint's manifest is in place: from now on a kill loses nothing before `step`."""

    name: str
    step: int


class Saving(Section):
    """Rank 0 has copied the state of `step` and is writing it; large models take a while from here to `CheckpointCommitted`."""

    step: int


class StopAsked(Section):
    """The driver has asked the workers to save and stop. Made by the driver itself."""


class Resumed(Section):
    """Training continues from a checkpoint."""

    step: int
    checkpoint: str
    exactness: str
    warnings: tuple[str, ...] = ()


class WorkerStarted(Section):
    """A rank's process is up; `restart` counts the worker groups before this one within the attempt."""

    rank: int
    host: str
    pid: int
    restart: int


class Warned(Section):
    """Something a user should know that does not stop training."""

    message: str


class Failure(Section):
    """A rank is about to die from an exception. `error` is set where it is an error a user can act on."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    rank: int
    t_ms: int
    final: bool
    """Whether a restart would only fail again, as with a bug in the recipe or a bad row."""
    text: str
    error: Exception | None = None


Event = Point | Progress | Saving | CheckpointCommitted | StopAsked | Resumed | WorkerStarted | Warned | Failure


class Mailbox:
    """The actor: a list of events, a stop flag, and which workers are alive. Holds nothing that matters after the attempt."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stop = False
        self._starts: dict[int, int] = {}
        self._workers: dict[int, Any] = {}
        self._controller: Any = None

    def start(self, rank: int, host: str, pid: int, worker: Any) -> dict[str, Any]:
        """Register a rank's process and its actor handle."""
        restart = self._starts.get(rank, 0)
        self._starts[rank] = restart + 1
        self._workers[rank] = worker
        self._events.append(WorkerStarted(rank=rank, host=host, pid=pid, restart=restart))
        return {"stop": self._stop, "restart": restart}

    def put(self, events: list[Event]) -> dict[str, bool]:
        """Add events of a rank; the answer says whether the driver wants training to stop."""
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


class MailboxClient(Protocol):
    """What a rank needs to reach the driver; tests give a list."""

    def put(self, events: list[Event]) -> bool:
        """Deliver events; True when training should stop."""


class RayMailboxClient:
    """A `MailboxClient` over the actor's handle."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def put(self, events: list[Event]) -> bool:
        """Deliver events, in order. A mailbox that is gone means that the driver is gone: save and stop."""
        try:
            return bool(ray.get(self._handle.put.remote(events), timeout=60)["stop"])
        except ray.exceptions.GetTimeoutError:
            return False  # a busy machine; Ray still delivers the call, before any later one
        except ray.exceptions.RayActorError:
            return True


class Courier:
    """Collects rank 0's events and delivers them from a background thread, so that no step waits for the network."""

    def __init__(self, client: MailboxClient, interval_s: float = PUT_INTERVAL_S) -> None:
        self.stop_requested = threading.Event()
        self._client = client
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._deliver_until_closed, name="penstock-courier", daemon=True)
        self._thread.start()

    def post(self, event: Event) -> None:
        """Queue an event; returns at once."""
        with self._lock:
            if isinstance(event, Progress):  # only the latest is of interest
                self._events = [waiting for waiting in self._events if not isinstance(waiting, Progress)]
            self._events.append(event)

    def close(self) -> None:
        """Deliver what is left and end the thread."""
        self._closing.set()
        self._thread.join()

    def _deliver_until_closed(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(self._interval_s)
            self._deliver()

    def _deliver(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        if self._client.put(events):
            self.stop_requested.set()


def now_ms(clock: Callable[[], float] = time.time) -> int:
    """Wall-clock milliseconds since 1970."""
    return int(clock() * 1000)
