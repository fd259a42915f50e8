"""Do the workers fit into the nodes of a cluster, and which CPUs or GPUs are missing?

A worker takes its CPUs and GPUs from one node, so needs are compared node by node: two nodes of 2 CPUs hold no worker of 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["gpus_of_auto", "missing_for_workers", "room_for"]

Resources = Mapping[str, float]


def _setting(name: str) -> str:
    return {"CPU": "train.cpus_per_worker", "GPU": "train.gpus"}.get(name, f"train.resources.{name}")


def room_for(need: Resources, nodes: Sequence[Resources]) -> int:
    """Count the workers, each of which takes `need`, that fit into the nodes."""
    return sum(min(int(node.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount) for node in nodes)


def gpus_of_auto(workers: int, cpus: float, nodes: Sequence[Resources], most: Resources | None) -> tuple[float, str, bool]:
    """Resolve `train.gpus: auto` on a cluster: one GPU per worker if all workers get one, else none.

    Args:
        cpus: of one worker.
        nodes: as for `missing_for_workers`.
        most: what the cluster can grow to, if its autoscaler has informed Ray; else None.

    Returns:
        (gpus, why, warns): `why` is a line of text; `warns` if there are GPUs that stay unused.
    """
    there = sum(node.get("GPU", 0.0) for node in nodes)
    one = {"CPU": cpus, "GPU": 1.0}
    each = "1 GPU" if workers == 1 else f"{workers} workers of 1 GPU each"
    if missing_for_workers(workers, one, nodes) is None:
        return 1.0, f"on {each} (train.gpus: auto)", False
    if most is not None and missing_for_workers(workers, one, nodes, most) is None:
        return 1.0, f"on {each}, which the cluster can grow to (train.gpus: auto)", False
    if there:
        lacks = missing_for_workers(workers, one, nodes)
        why = f"on CPUs, because train.gpus: auto takes 1 GPU for each worker or none, and lacks {lacks}"
        return 0.0, f"{why}. To use GPUs, lower train.workers or add nodes", True
    return 0.0, "on CPUs: there is no GPU now (train.gpus: auto)", False


def missing_for_workers(
    workers: int, need: Resources, nodes: Sequence[Resources], most: Resources | None = None, where: str = "the cluster"
) -> str | None:
    """Describe what the nodes lack for so many workers, as words that follow "lacks"; None if all fit.

    Args:
        need: CPU and GPU of one worker.
        nodes: CPU and GPU of each node.
        most: what all nodes together can grow to, if that is known.
        where: what the nodes are, for the words.
    """
    if room_for(need, nodes) >= workers:
        return None
    if most is not None and all(workers * amount <= most.get(name, 0.0) for name, amount in need.items()):
        return None
    for name, amount in need.items():
        there, needed = sum(node.get(name, 0.0) for node in nodes), workers * amount
        if there < needed:
            more = needed - there
            of = f"train.workers: {workers}" if workers > 1 else "1 worker"
            each = "" if amount == 1 else f" with {_setting(name)}: {amount:g}"
            what = "bytes of memory" if name == "memory" else f"{name}{'s' if more > 1 else ''}"
            return f"{more:g} more {what}: {where} has {there:g}, {of}{each} needs {needed:g}"
    plural = "s" if workers > 1 else ""
    one = " and ".join(f"{amount:g} {name}" for name, amount in need.items() if amount)
    has = "; ".join(", ".join(f"{node.get(name, 0.0):g} {name}" for name in need) for node in nodes)
    return (
        f"nodes that hold {workers} worker{plural} of {one} (train.workers, {', '.join(_setting(name) for name in need)}): "
        f"there is room for {room_for(need, nodes)}, the nodes have {has}"
    )
