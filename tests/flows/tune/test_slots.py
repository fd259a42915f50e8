"""Trials at once never need more CPUs than there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.flows.spec_file import load_spec
from penstock.flows.tune.driver import trials_at_once
from tests.drills.project import make_project

ON_CPUS = "on CPUs: there is no GPU now (train.gpus: auto)"


def slots(
    folder: Path, nodes: list[dict[str, float]], most: dict[str, float] | None = None, **tune: Any
) -> tuple[int, list[str]]:
    file = make_project(folder / "project", files=1, workers=2)
    space = "{train.learning_rate: {choice: [0.1, 0.2, 0.3, 0.4]}}"
    resources = tune.pop("resources", {})
    more = "".join(f"  {key}: {value}\n" for key, value in tune.items())
    file.write_text(file.read_text() + f"tune:\n  space: {space}\n{more}")
    loaded = load_spec(file, [f"train.resources={resources}"])  # two workers of half a CPU
    assert loaded.spec.tune is not None
    return trials_at_once(loaded.spec, loaded.spec.tune, nodes, most)


def test_trials_at_once_fit_the_nodes(tmp_path: Path) -> None:
    assert slots(tmp_path / "a", [{"CPU": 2.0}]) == (2, [ON_CPUS])
    assert slots(tmp_path / "b", [{"CPU": 2.0}], concurrent=1) == (1, [ON_CPUS])
    assert slots(tmp_path / "c", [{"CPU": 16.0}], trials=3) == (3, [ON_CPUS])


def test_too_many_at_once_are_lowered_with_a_line(tmp_path: Path) -> None:
    fit, said = slots(tmp_path, [{"CPU": 2.0}, {"CPU": 0.9}], concurrent=8)
    assert fit == 2
    assert said == [ON_CPUS, "2 trials at once instead of 8, which the nodes cannot hold"]


def test_other_resources_of_a_worker_count(tmp_path: Path) -> None:
    fit, _ = slots(tmp_path, [{"CPU": 16.0, "disk": 2.0}, {"CPU": 16.0}], resources={"disk": 0.5})
    assert fit == 2


def test_autoscaled_cluster_counts_for_a_trial(tmp_path: Path) -> None:
    fit, said = slots(tmp_path / "cpus", [{"CPU": 0.5}], {"CPU": 8.0, "GPU": 2.0}, concurrent=1)
    assert (fit, said) == (1, ["on 2 workers of 1 GPU each, which the cluster can grow to (train.gpus: auto)"])
    _, (why, *_) = slots(tmp_path / "gpus", [{"CPU": 4.0, "GPU": 1.0}])
    assert why.startswith("on CPUs, because train.gpus: auto takes 1 GPU for each worker or none, and lacks 1 more GPU")
