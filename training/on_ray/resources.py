"""Do the workers fit into the nodes of a cluster, and what is missing if they do not?

A worker takes its CPUs and GPUs from one node, so needs are compared node by node: two nodes of 2 CPUs hold no worker of 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["missing_for_workers", "room_for"]

Resources = Mapping[str, float]

_SETTING = {"CPU": "train.cpus_per_worker", "GPU": "train.gpus"}


def room_for(need: Resources, nodes: Sequence[Resources]) -> int:
    """How many workers that each take `need` fit into the nodes."""
    return sum(min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount) for node in nodes)


def missing_for_workers(workers: int, need: Resources, nodes: Sequence[Resources]) -> str | None:
    """What nodes with these resources lack for so many workers, in words that follow "waiting for"; None if all fit.

    Args:
        need: CPU and GPU of one worker.
        nodes: the same of each node that is there.
    """
    if room_for(need, nodes) >= workers:
        return None
    for name, amount in need.items():
        there, needed = sum(node.get(name, 0.0) for node in nodes), workers * amount
        if there < needed:
            more = needed - there
            each = "" if amount == 1 else f" with {_SETTING[name]}: {amount:g}"
            return (
                f"{more:g} more {name}{'s' if more > 1 else ''}: the cluster has {there:g}, "
                f"train.workers: {workers}{each} needs {needed:g}"
            )
    plural = "s" if workers > 1 else ""
    one = " and ".join(f"{amount:g} {name}" for name, amount in need.items() if amount)
    has = "; ".join(", ".join(f"{node.get(name, 0.0):g} {name}" for name in need) for node in nodes)
    return (
        f"nodes that hold {workers} worker{plural} of {one} (train.workers, {', '.join(_SETTING[name] for name in need)}): "
        f"there is room for {room_for(need, nodes)}, the nodes have {has}"
    )
