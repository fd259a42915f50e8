"""Do the settings of the train section reach Ray Train?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.training.job import TrainJob
from penstock.training.on_ray.train_group import _trainer
from penstock.training.spec import TrainSpec
from tests.training.digits import make_job


def test_backend_resources_and_placement_reach_ray(tmp_path: Path) -> None:
    def made(**spec: Any) -> tuple[Any, Any, TrainJob]:
        job = make_job(tmp_path, workers=2, **spec)
        trainer: Any = _trainer(job, None, {"CPU": 1.0, **job.spec.resources}, None)  # type: ignore[arg-type]
        return trainer.backend_config, trainer.scaling_config, job

    backend, scaling, job = made(
        backend={"name": "gloo", "timeout_s": 60, "init_method": "tcp"}, resources={"tape": 1}, placement="SPREAD"
    )
    assert (backend.backend, backend.timeout_s, backend.init_method) == ("gloo", 60, "tcp")
    assert (scaling.resources_per_worker, scaling.placement_strategy) == ({"CPU": 1.0, "tape": 1.0}, "SPREAD")
    assert job.settings["train.backend.name"] == "gloo"
    backend, scaling, job = made()
    assert (backend.backend, backend.timeout_s, scaling.placement_strategy) == ("gloo", 900, "PACK"), "Ray chooses the first"
    assert "train.backend.name" not in job.settings


def test_cpus_among_resources_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train\.cpus_per_worker"):
        TrainSpec(recipe="model.py:Net", resources={"CPU": 2})
