"""Ranks go by the addresses of nodes, not by the order in which Ray placed the workers."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from ray.train.v2._internal.execution.worker_group import ActorMetadata, Worker, WorkerGroup

from penstock.training.on_ray.controller_callbacks import keep_ranks_on_their_nodes

SORT = "_sort_workers_by_gpu_id_grouped_by_node"


def worker(address: str, gpu: int) -> Worker:
    metadata = ActorMetadata(address, f"id of {address}", node_ip=address, pid=1, accelerator_ids={"GPU": [gpu]})
    unused: Any = None
    return Worker(actor=unused, metadata=metadata, resources={}, placement_group_bundle_index=0)


def test_ranks_do_not_depend_on_the_order_of_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerGroup, SORT, staticmethod(getattr(WorkerGroup, SORT)))
    keep_ranks_on_their_nodes()
    placed = [worker("10.0.0.9", 1), worker("10.0.0.10", 0), worker("10.0.0.9", 0), worker("10.0.0.2", 0)]
    for order in permutations(placed):
        ranks = getattr(WorkerGroup, SORT)(list(order))
        found = [(one.metadata.node_ip, one.metadata.accelerator_ids["GPU"]) for one in ranks]
        assert found == [("10.0.0.2", [0]), ("10.0.0.9", [0]), ("10.0.0.9", [1]), ("10.0.0.10", [0])]
