"""On which nodes of a Ray cluster do the tasks run that read and prepare rows, and what does each of them take?

Where a task runs changes no row, so nothing of this is in the key of a stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from penstock.config import Section
from penstock.errors import PreflightError
from penstock.messages import capped

__all__ = ["ANYWHERE", "ClusterNode", "PrepareSpec", "living_nodes", "most_resources", "nodes_refused"]

_NAME = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"

_KEY = re.compile(rf"([a-zA-Z0-9_.-]{{1,253}}/)?{_NAME}")

_SELECTOR = re.compile(rf"!?({_NAME}|in\({_NAME}(, ?{_NAME})*\))")


class ClusterNode(NamedTuple):
    """A living node of a Ray cluster."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]


def _further(resources: dict[str, float]) -> dict[str, float]:
    if named := {"CPU", "GPU", "memory"} & resources.keys():
        raise ValueError(
            f"{', '.join(sorted(named))}: CPU and memory are prepare.cpus and prepare.memory; GPUs are map_batches.num_gpus"
        )
    return resources


def _selectors(labels: dict[str, str]) -> dict[str, str]:
    for key, value in labels.items():
        if not _KEY.fullmatch(key) or not _SELECTOR.fullmatch(value):
            raise ValueError(f"{key}: {value}: a label is written as value, !value, in(a, b) or !in(a, b)")
    return labels


class PrepareSpec(Section):
    """What each task that reads and prepares rows takes of a Ray cluster, and on which nodes it runs. It changes no row."""

    cpus: PositiveFloat | None = None
    """CPUs of a task; without it 1, and a quarter for a stream (`cache: none`), whose tasks run beside the workers."""
    memory: PositiveInt | None = None
    """Bytes of memory that a task reserves of its node, so that fewer run there at once; Ray does not enforce it."""
    resources: Annotated[dict[str, PositiveFloat], AfterValidator(_further)] = Field(default_factory=dict)
    """Further resources that a task reserves, by the names of `ray start --resources`: `{prepares: 1}`."""
    labels: Annotated[dict[str, str], AfterValidator(_selectors)] = Field(default_factory=dict)
    """Labels of the nodes that it may run on (`ray start --labels`), each as `value`, `!value`, `in(a, b)` or `!in(a, b)`:
    `{ray.io/accelerator-type: "!H100"}` or `{pool: cpu}`."""
    concurrency: PositiveInt | None = None
    """Most tasks at once; without it as many as the nodes hold."""

    @property
    def gpus(self) -> float:
        """GPUs of a task."""
        return self.resources.get("GPU", 0.0)

    def with_gpus(self, gpus: float) -> PrepareSpec:
        """Return it for tasks that hold GPUs."""
        return self.model_copy(update={"resources": {**self.resources, "GPU": gpus}}) if gpus else self

    def need(self, cpus: float = 1.0) -> dict[str, float]:
        """Return what a task takes of a node, by Ray's names; `cpus` if the section sets none."""
        memory = {} if self.memory is None else {"memory": float(self.memory)}
        return {"CPU": self.cpus or cpus, **memory, **self.resources}

    def options(self, cpus: float = 1.0) -> dict[str, Any]:
        """Return the options of a Ray task."""
        own = {name: amount for name, amount in self.resources.items() if name != "GPU"}
        found: dict[str, Any] = {"num_cpus": self.cpus or cpus, "memory": self.memory, "resources": own or None}
        found["num_gpus"] = self.gpus or None
        return found | ({"label_selector": self.labels} if self.labels else {})

    def fitting(self, nodes: Sequence[ClusterNode], cpus: float = 1.0) -> list[int]:
        """Return how many tasks each node holds at once that can run one."""
        chosen = (node for node in nodes if _has_labels(node, self.labels))
        counts = (
            min(int(node.resources.get(name, 0.0) / of + 1e-9) for name, of in self.need(cpus).items()) for node in chosen
        )
        return [count for count in counts if count]

    def at_once(self, nodes: Sequence[ClusterNode], cpus: float = 1.0) -> int:
        """Return how many tasks run at once on the nodes; 0 if none can."""
        room = sum(self.fitting(nodes, cpus))
        return room if self.concurrency is None else min(room, self.concurrency)

    def __str__(self) -> str:
        """Format it as words: "tasks of 2 CPUs on nodes with pool=cpu, at most 8 at once"."""
        each = [f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}" if self.cpus is not None else ""]
        each += [f"{self.memory / 1e9:g} GB of memory" if self.memory is not None else ""]
        each += [f"{amount:g} {name}" for name, amount in self.resources.items()]
        taken = ", ".join(filter(None, each))
        labels = " and ".join(f"{key}={value}" for key, value in self.labels.items())
        most = "" if self.concurrency is None else f", at most {self.concurrency} at once"
        return f"tasks{' of ' * bool(taken)}{taken}{' on nodes with ' * bool(labels)}{labels}{most}"


ANYWHERE = PrepareSpec()


def living_nodes() -> list[ClusterNode]:
    """Return the nodes of the Ray cluster that this process is connected to."""
    import ray  # a spec is checked without it

    return [ClusterNode(node["Resources"], node.get("Labels") or {}) for node in ray.nodes() if node["Alive"]]


def most_resources() -> Mapping[str, float] | None:
    """Return the resources that all nodes together can grow to, if an autoscaler has informed Ray; else None."""
    from ray._private.state import state

    found: Mapping[str, float] | None = state.get_max_resources_from_cluster_config()
    return found


def nodes_refused(
    where: PrepareSpec,
    nodes: Sequence[ClusterNode],
    most: Mapping[str, float] | None = None,
    *,
    tasks: int = 1,
    cpus: float = 1.0,
) -> PreflightError | None:
    """Return the error if so many tasks cannot run at once on the nodes, else None.

    Args:
        most: resources that all nodes together can grow to, if an autoscaler has informed Ray: a new node may have any label.
        tasks: how many must run at once.
        cpus: of a task, if `where` sets none.
    """
    room, need = where.at_once(nodes, cpus), where.need(cpus)
    grows = most is not None and all(tasks * amount <= most.get(name, 0.0) for name, amount in need.items())
    if room >= tasks or (grows and (where.concurrency or tasks) >= tasks):
        return None
    problems = [
        f"prepare.labels.{key}: no node has {key}={wanted}; {_labels_there(nodes, key)}"
        for key, wanted in where.labels.items()
        if not any(_has_labels(node, {key: wanted}) for node in nodes)
    ]
    chosen = [node for node in nodes if _has_labels(node, where.labels)] or nodes
    for name, amount in need.items():
        largest = max((node.resources.get(name, 0.0) for node in chosen), default=0.0)
        if largest < amount:
            setting = {"CPU": "cpus", "memory": "memory", "GPU": "map_batches.num_gpus"}.get(name, f"resources.{name}")
            found = f"the largest node has {largest:g}" if largest else f"no node has any; they have {_resources_there(chosen)}"
            problems.append(f"prepare.{setting}: a task takes {amount:g} {name}, and {found}")
    if not problems:
        held = f"the nodes hold {room}" + ("" if where.concurrency is None else f" (prepare.concurrency: {where.concurrency})")
        needs = "no node has all that a task takes" if not room else f"{tasks} tasks must run at once, and {held}"
        problems.append(f"prepare: {needs}: {', '.join(f'{amount:g} {name}' for name, amount in need.items())}")
    return PreflightError(
        "the tasks that read and prepare rows would wait for ever",
        problems=problems,
        next_step="correct `prepare` in the pipeline file, or start nodes that have it (ray start --labels, --resources)",
    )


def _has_labels(node: ClusterNode, labels: Mapping[str, str]) -> bool:
    return all(_selects(selector, node.labels.get(key)) for key, selector in labels.items())


def _selects(selector: str, value: str | None) -> bool:
    """Whether a label's value is selected, as Ray does it: a node without the label has none of the values."""
    plain = selector.removeprefix("!")
    values = re.split(", ?", plain[3:-1]) if plain.startswith("in(") else [plain]
    return (value in values) != selector.startswith("!")


def _labels_there(nodes: Sequence[ClusterNode], key: str) -> str:
    if values := sorted({node.labels[key] for node in nodes if key in node.labels}):
        return f"its values there are {', '.join(capped(values, 5))}"
    names = sorted({name for node in nodes for name in node.labels if name != "ray.io/node-id"})
    return f"the nodes have the labels {', '.join(capped(names, 8))}" if names else "the nodes have no labels"


def _resources_there(nodes: Sequence[ClusterNode]) -> str:
    return ", ".join(capped(sorted({name for node in nodes for name in node.resources if not name.startswith("node:")}), 8))
