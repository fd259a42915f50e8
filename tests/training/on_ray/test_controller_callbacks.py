"""Ranks stay on their nodes, whatever the order in which Ray placed the workers; a new node takes the place of a lost one."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(WorkerGroup, SORT, staticmethod(getattr(WorkerGroup, SORT)))
    yield


def places(*addresses: str) -> list[str]:
    return [each.metadata.hostname for each in getattr(WorkerGroup, SORT)([worker(address, 0) for address in addresses])]


def test_ranks_do_not_depend_on_the_order_of_placement() -> None:
    keep_ranks_on_their_nodes()
    placed = [worker("10.0.0.9", 1), worker("10.0.0.10", 0), worker("10.0.0.9", 0), worker("10.0.0.2", 0)]
    for order in permutations(placed):
        ranks = getattr(WorkerGroup, SORT)(list(order))
        found = [(one.metadata.node_ip, one.metadata.accelerator_ids["GPU"]) for one in ranks]
        assert found == [("10.0.0.2", [0]), ("10.0.0.9", [0]), ("10.0.0.9", [1]), ("10.0.0.10", [0])]


def test_new_node_takes_place_of_lost_one_and_no_other_moves() -> None:
    keep_ranks_on_their_nodes()
    assert places("10.0.0.4", "10.0.0.2", "10.0.0.3") == ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
    assert places("10.0.0.9", "10.0.0.4", "10.0.0.3") == ["10.0.0.9", "10.0.0.3", "10.0.0.4"], "node 2 is lost, 9 is new"
    assert places("10.0.0.4", "10.0.0.9") == ["10.0.0.9", "10.0.0.4"], "no node takes the place of 3"
    assert places("10.0.0.4", "10.0.0.9", "10.0.0.3") == ["10.0.0.9", "10.0.0.3", "10.0.0.4"], "it comes back to it"


def test_next_command_gives_each_node_its_ranks_again() -> None:
    keep_ranks_on_their_nodes(["10.0.0.9", "10.0.0.9", "10.0.0.3"])
    assert places("10.0.0.3", "10.0.0.9", "10.0.0.9") == ["10.0.0.9", "10.0.0.9", "10.0.0.3"]
