"""How often is a model loaded where rows are scored, and what does `--gpus` say where the cluster has no GPU?"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import PreflightError
from penstock.flows.predict import flow
from penstock.flows.predict.request import PredictRequest
from penstock.flows.servers.ray_local import RayCluster
from penstock.ingest.ray_tasks import ray_map
from penstock.storage import Storage
from penstock.training.registry.load import FetchedModel
from tests.conformance.conftest import ray_cluster  # noqa: F401 - a fixture


def test_gpus_that_no_node_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "LoadedModel", lambda _folder: SimpleNamespace(form=SimpleNamespace(requires={})))
    request = PredictRequest(model="m", input="in", output=str(tmp_path), gpus=True, state_dir=str(tmp_path))
    cluster = RayCluster("10.0.0.1:6379", embedded=False, nodes=({"CPU": 4.0},), most=None)
    with pytest.raises(PreflightError, match=r"--gpus: the Ray cluster 10\.0\.0\.1:6379 has no GPU") as refused:
        flow._on_ray(lambda: cluster, request, FetchedModel(tmp_path), [], Storage(str(tmp_path)), [])
    assert "leave --gpus out" in refused.value.next_step


class Made:
    """Stands for a loaded model."""

    count = 0

    def __init__(self, _files: Any) -> None:
        Made.count += 1

    def __call__(self, job: int) -> tuple[int, int, str]:
        return job, Made.count, os.environ["CUDA_VISIBLE_DEVICES"]


def score(packed: Any, job: int) -> Any:
    flow.Scorer = Made  # type: ignore[assignment,misc]
    return flow._score_there(packed, job)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_process_loads_the_model_once_and_sees_no_gpu() -> None:
    import ray

    scored = list(ray_map(partial(score, ray.put({})), list(range(8)), keeps_gpus=True))
    assert sorted(scored) == [(job, 1, "") for job in range(8)]
