"""What is known when no step is done for a while: which node is silent, or what do the workers wait for?

Only what is known is said, and rarely: a step may rightly take a minute. Ray itself calls a node that lost its power dead after
a minute or so; a connection to the node's own port tells within seconds that it does not answer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import ray
from ray._private.state import state as ray_state

from penstock.errors import TrainingError
from penstock.training.events import (
    CheckpointCommitted,
    Event,
    Failure,
    Notice,
    Saving,
    TrainProgress,
    WorkersLost,
    WorkersStarting,
    WorkerStarted,
)
from penstock.training.on_ray.resources import missing_for_workers
from penstock.training.spec import TrainSpec

__all__ = ["Cluster", "Node", "Silence"]

FIRST_S = 15.0
"""Seconds without a step until the first line; each later one takes twice as long."""

SHORT_S = 5.0
"""Seconds until a start that lacks CPUs or GPUs says so."""

BOUND_TOLD_S = 60.0
"""A start that lacks nothing may be slow: how long it is waited for is said from here on."""

CONNECT_S = 2.0
"""How long a node may take to accept a connection."""


@dataclass(frozen=True)
class Node:
    """A node as Ray knows it."""

    id: str
    host: str
    address: str
    port: int
    """Of its raylet, which other nodes reach too."""
    alive: bool
    """False once Ray has called it dead."""
    resources: Mapping[str, float]

    def __str__(self) -> str:
        return self.host if self.host == self.address else f"{self.host} ({self.address})"


class Cluster:
    """The cluster that this process is connected to."""

    def __init__(self) -> None:
        self._seen: list[Node] = []

    def head_answers(self) -> bool:
        """Whether a connection to Ray's head is accepted. Ray's own calls wait for a silent head, and then end the process."""
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        return _accepts(host, int(port))

    def nodes(self) -> list[Node]:
        """All nodes that Ray remembers, dead ones too. While the head is silent: as they were last."""
        if self.head_answers():
            self._seen = [
                Node(
                    id=node["NodeID"],
                    host=node["NodeManagerHostname"],
                    address=node["NodeManagerAddress"],
                    port=int(node["NodeManagerPort"]),
                    alive=bool(node["Alive"]),
                    resources=node["Resources"],
                )
                for node in ray.nodes()
            ]
        return self._seen

    def most(self) -> Mapping[str, float] | None:
        """What all nodes together can grow to, where an autoscaler has told Ray; None where nothing is known."""
        return ray_state.get_max_resources_from_cluster_config()  # type: ignore[no-any-return]

    def free(self) -> Mapping[str, float]:
        """Resources of all nodes together that nothing holds now."""
        return ray.available_resources()  # type: ignore[no-any-return]

    def silent(self, nodes: Sequence[Node]) -> list[Node]:
        """Those of the nodes that accept no connection."""
        if not nodes:
            return []
        with ThreadPoolExecutor(max_workers=min(32, len(nodes))) as pool:
            answers = pool.map(lambda node: _accepts(node.address, node.port), nodes)
            return [node for node, answer in zip(nodes, answers, strict=True) if not answer]


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


@dataclass
class Silence:
    """Follows the events of an attempt and tells, when no step comes, what is known.

    Attributes:
        spec: what is trained.
        need: CPU and GPU of one worker.
        cluster: where to look.
        clock: monotonic seconds.
    """

    spec: TrainSpec
    need: Mapping[str, float]
    cluster: Cluster = field(default_factory=Cluster)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._since_s = self._due_from_s = self.clock()
        """When the last step was done, or the start of the workers began."""
        self._pause_s = SHORT_S
        self._told = False
        self._waiting = True
        """For workers to start."""
        self._longest_s = 0.0
        """Between two steps so far, in this process's view."""
        self._up: dict[int, str] = {}
        """Rank -> id of its node, of the newest worker group."""
        self._failed: set[int] = set()
        """Ranks that said themselves why they end."""
        self._step: int | None = None
        self._last = False
        self._saving: int | None = None

    def hear(self, events: Iterable[Event]) -> list[Event]:
        """Take in events; returns them with what can be added: which node a lost worker was on, and that training goes on."""
        heard: list[Event] = []
        for event in events:
            if isinstance(event, WorkersLost):
                heard.append(event.model_copy(update={"who": self._who(event.ranks)}))
            elif isinstance(event, TrainProgress):
                heard += [event, *self._stepped(event)]
            else:
                heard.append(event)
            if isinstance(event, WorkersStarting):
                self._up, self._step, self._saving = {}, None, None
                self._failed.clear()
                if not self._waiting:  # else Ray Train asks again: it is still the same wait
                    self._begin(SHORT_S)
                self._waiting = True
            elif isinstance(event, WorkerStarted):
                self._up[event.rank] = event.node
                if len(self._up) == self.spec.workers:
                    self._waiting = False
                    self._begin(FIRST_S)
                    self.cluster.nodes()  # to know them, should the head fall silent
            elif isinstance(event, Failure):
                self._failed.add(event.rank)
            elif isinstance(event, Saving):
                self._saving = event.step
            elif isinstance(event, CheckpointCommitted) and event.step == self._saving:
                self._saving = None
        return heard

    def tell(self) -> list[Event]:
        """The line that is due, if one is.

        Raises:
            TrainingError: the workers could not be placed for `train.wait_s`.
        """
        now_s = self.clock()
        starting = len(self._up) < self.spec.workers
        still_s = now_s - self._since_s
        if starting and still_s > self.spec.wait_s:
            raise self._waited_enough()
        if now_s - self._due_from_s < self._pause_s:
            return []
        text = self._start(still_s) if starting else self._training(still_s)
        self._due_from_s = now_s
        self._pause_s = max(FIRST_S - still_s, 1.0) if still_s < FIRST_S - 1 else still_s
        if text is None:
            return []
        self._told = True
        return [Notice(message=text)]

    def _begin(self, pause_s: float) -> None:
        self._since_s = self._due_from_s = self.clock()
        self._pause_s = pause_s

    def _stepped(self, event: TrainProgress) -> list[Event]:
        still_s = self.clock() - self._since_s
        text = f"step {event.step:,} is done"  # of workers that have just started
        if self._step is not None:
            text = f"goes on at step {event.step:,}"
            self._longest_s = max(self._longest_s, still_s)
        self._step, self._last = event.step, event.step == event.total_steps
        self._begin(FIRST_S)
        told, self._told = self._told, False
        return [Notice(message=text)] if told else []

    def _who(self, ranks: Sequence[int]) -> str:
        """The ranks that ended without a word, with their nodes; those that said why are its consequence as a rule."""
        silent = [rank for rank in ranks if rank not in self._failed] or list(ranks)
        nodes = {node.id: node for node in self.cluster.nodes()}
        where: dict[str, list[str]] = {}
        for rank in silent:
            where.setdefault(self._up.get(rank, ""), []).append(str(rank))
        parts = []
        for node_id, numbers in where.items():
            part = f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
            node = nodes.get(node_id)
            if node is not None and len(nodes) > 1:
                part += f" on {node}" + ("" if node.alive else ", a node that Ray has lost")
            parts.append(part)
        return " and ".join(parts)

    def _start(self, still_s: float) -> str | None:
        if not self.cluster.head_answers():
            return f"waiting for the workers; the head of the Ray cluster does not answer ({still_s:.0f} s)"
        nodes = [node for node in self.cluster.nodes() if node.alive]
        lacks = missing_for_workers(self.spec.workers, self.need, [node.resources for node in nodes])
        if lacks is not None:
            return f"waiting for {lacks}. {self._bound(still_s)}"
        if still_s < FIRST_S - 1:
            return None
        silent = self.cluster.silent(nodes) if len(nodes) > 1 else []
        if silent:
            return f"waiting for the workers for {still_s:.0f} s; {_names(silent)}"
        up = f"waiting for the workers for {still_s:.0f} s; {len(self._up)} of {self.spec.workers} have started"
        return up + (f"; {self._free(nodes)}. {self._bound(still_s)}" if still_s > BOUND_TOLD_S else "")

    def _free(self, nodes: Sequence[Node]) -> str:
        free = self.cluster.free()
        there = {name: sum(node.resources.get(name, 0.0) for node in nodes) for name in self.need}
        return ", ".join(f"{free.get(name, 0.0):g} of the cluster's {there[name]:g} {name}s are free" for name in self.need)

    def _bound(self, still_s: float) -> str:
        left_s = max(0.0, self.spec.wait_s - still_s)
        return (
            f"The command ends in {left_s:.0f} s if they do not come (train.wait_s: {self.spec.wait_s:g}); the same command "
            "continues"
        )

    def _training(self, still_s: float) -> str | None:
        nodes = {node.id: node for node in self.cluster.nodes()}
        if len(nodes) > 1:
            if not self.cluster.head_answers():
                return f"no step for {still_s:.0f} s; the head of the Ray cluster does not answer"
            silent = self.cluster.silent([nodes[each] for each in dict.fromkeys(self._up.values()) if each in nodes])
            if silent:
                return f"no step for {still_s:.0f} s; {_names(silent)}"
        if still_s < 2 * self._longest_s and not self._last:  # nothing new: steps take as long
            return None
        saving = f"the checkpoint of step {self._saving:,} is being written" if self._saving is not None else ""
        if self._last:
            return f"all steps are done for {still_s:.0f} s; {saving or 'the workers have not ended yet'}"
        if self._step is None:
            began = f"{self.spec.workers} workers have started" if self.spec.workers > 1 else "the worker has started"
            return f"no step yet, {still_s:.0f} s after {began}"
        answer = "all nodes of the workers answer, " if len(nodes) > 1 else ""
        return f"no step for {still_s:.0f} s; {saving or f'{answer}the last one was {self._step:,}'}"

    def _waited_enough(self) -> TrainingError:
        nodes = [node.resources for node in self.cluster.nodes() if node.alive]
        lacks = missing_for_workers(self.spec.workers, self.need, nodes)
        return TrainingError(
            f"the workers could not start within {self.spec.wait_s:g} s (train.wait_s)"
            + (f": still waiting for {lacks}" if lacks else f": {len(self._up)} of {self.spec.workers} have"),
            next_step="add the nodes, or lower train.workers; then run the same command, which continues from the newest "
            "checkpoint",
        )


def _names(silent: Sequence[Node]) -> str:
    return f"{', '.join(map(str, silent))} {'do' if len(silent) > 1 else 'does'} not answer"
