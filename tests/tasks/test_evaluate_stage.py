"""Where is a checkpoint measured? On a cluster by a process with what a training worker has, not by the command's machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.tasks import evaluate
from penstock.training.spec import TrainSpec


class Asked(Exception):
    """It was put to a worker."""


def test_evaluate_on_cluster_measures_on_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_one_worker(spec: TrainSpec, what: str, work: Any, say: Any, *, has_trained: bool) -> Any:
        say("waits")
        raise Asked(what, spec.cpus_per_worker, work.func)

    for name in ("trusted_checkpoint", "model_checkpoint", "held_out_of", "make_job", "model_spec"):
        monkeypatch.setattr(evaluate, name, lambda *_: SimpleNamespace(storage=None))
    monkeypatch.setattr("penstock.training.on_ray.one_worker.on_one_worker", on_one_worker)
    spec = SimpleNamespace(
        train=TrainSpec(recipe="m.py:M", cpus_per_worker=3), evaluate=SimpleNamespace(slices=(), metrics=None)
    )
    connected: list[bool] = []
    said: list[str] = []
    ctx: Any = SimpleNamespace(
        project=SimpleNamespace(spec=spec),
        manifest=SimpleNamespace(rows={"test": 4}),
        work_storage=None,
        on_cluster=True,
        reporter=SimpleNamespace(report=said.append),
        need_ray=lambda: connected.append(True),
    )
    with pytest.raises(Asked) as asked:
        evaluate.STAGE.run(ctx)
    assert asked.value.args == ("evaluate", 3, evaluate.measure_held_out) and connected and said == ["waits"]
