"""How many processes score, and what does `penstock predict --gpus` say where the cluster has no GPU?"""

from __future__ import annotations

import pytest

from penstock.errors import PreflightError
from penstock.flows.predict.flow import processes_on
from penstock.flows.servers.ray_local import RayCluster


def cluster(num_gpus: int) -> RayCluster:
    nodes = ({"CPU": 4.0, "GPU": float(num_gpus)},)
    return RayCluster("10.0.0.1:6379", embedded=False, nodes=nodes, most=None)


def test_each_process_takes_a_gpu_where_they_are_asked_for_and_a_cluster_without_is_named() -> None:
    assert processes_on(cluster(2), 9, gpus=True) == {"processes": 2, "num_gpus": 1}
    assert processes_on(cluster(2), 9, gpus=False) == {"processes": 4, "num_gpus": 0}
    assert processes_on(cluster(2), 1, gpus=True) == {"processes": 1, "num_gpus": 1}
    with pytest.raises(PreflightError, match=r"--gpus: the Ray cluster 10\.0\.0\.1:6379 has no GPU") as refused:
        processes_on(cluster(0), 9, gpus=True)
    assert "leave --gpus out" in refused.value.next_step
