"""Do the tasks that read and prepare rows run on the nodes that `prepare` chooses, and is it refused where there is none?"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from penstock.errors import PreflightError, SpecError
from penstock.flows.preflight.checks import check_cluster, check_machine, check_resources
from penstock.flows.preflight.cpus import cpus_needed
from penstock.flows.servers.ray_local import RayCluster
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.plan import describe_preparing, format_preparing, plan_pipeline
from penstock.ingest.prepare import ClusterNode, PrepareSpec, living_nodes, nodes_refused
from penstock.ingest.ray_tasks import ray_map, ray_streams
from penstock.ingest.read.snapshot import read_source
from penstock.ingest.task_counts import TaskCounts
from penstock.progress import silent
from tests import ROOT
from tests.drills.project import make_project
from tests.ingest.preparing import Source
from tests.ingest.reading import listed

CPU_NODE = ClusterNode({"CPU": 8.0, "memory": 32e9, "tape": 2.0}, {"pool": "cpu", "zone": "a", "ray.io/node-id": "1"})
GPU_NODE = ClusterNode({"CPU": 16.0, "memory": 64e9, "GPU": 8.0}, {"pool": "gpu", "ray.io/node-id": "2"})
BARE_NODE = ClusterNode({"CPU": 2.0, "memory": 4e9}, {"ray.io/node-id": "3"})
NODES = [CPU_NODE, GPU_NODE, BARE_NODE]


@pytest.mark.parametrize(
    ("section", "held"),
    [
        ({}, [8, 16, 2]),
        ({"cpus": 4}, [2, 4]),
        ({"memory": 8_000_000_000}, [4, 8]),
        ({"labels": {"pool": "cpu"}}, [8]),
        ({"labels": {"pool": "!gpu"}}, [8, 2]),
        ({"labels": {"pool": "in(cpu, gpu)"}}, [8, 16]),
        ({"labels": {"pool": "!in(cpu,gpu)"}}, [2]),
        ({"labels": {"pool": "cpu", "zone": "a"}, "resources": {"tape": 0.5}}, [4]),
    ],
)
def test_fitting_counts_tasks_of_each_chosen_node(section: dict[str, Any], held: list[int]) -> None:
    where = PrepareSpec.model_validate(section)
    assert where.fitting(NODES) == held and where.at_once(NODES) == sum(held)
    assert where.model_copy(update={"concurrency": 3}).at_once(NODES) == min(3, sum(held))
    assert nodes_refused(where, NODES) is None


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"labels": {"pool": "tpu"}}, "prepare.labels.pool: no node has pool=tpu; its values there are cpu, gpu"),
        ({"labels": {"disk": "ssd"}}, "prepare.labels.disk: no node has disk=ssd; the nodes have the labels pool, zone"),
        (
            {"resources": {"tpae": 1}},
            "prepare.resources.tpae: a task takes 1 tpae, and no node has any; they have CPU, GPU, memory, tape",
        ),
        ({"cpus": 12, "labels": {"pool": "cpu"}}, "prepare.cpus: a task takes 12 CPU, and the largest node has 8"),
        ({"memory": 80_000_000_000}, "prepare.memory: a task takes 8e+10 memory, and the largest node has 6.4e+10"),
        (
            {"resources": {"tape": 1}, "memory": 40_000_000_000},
            "prepare: no node has all that a task takes: 1 CPU, 4e+10 memory, 1 tape",
        ),
    ],
)
def test_section_that_no_node_meets_is_refused_by_name(section: dict[str, Any], problem: str) -> None:
    refusal = nodes_refused(PrepareSpec.model_validate(section), NODES)
    assert refusal is not None and refusal.problems == (problem,)
    assert "ray start --labels" in refusal.next_step
    grown = {"CPU": 100.0, "memory": 1e12, "tape": 2.0, "tpae": 2.0}
    assert nodes_refused(PrepareSpec.model_validate(section), NODES, grown) is None, "an autoscaler starts a node for it"


def test_streams_need_all_their_tasks_at_once() -> None:
    one = PrepareSpec(labels={"pool": "cpu"}, concurrency=3)
    assert nodes_refused(one, NODES, tasks=3, cpus=0.25) is None
    refusal = nodes_refused(one, NODES, {"CPU": 100.0}, tasks=4, cpus=0.25)
    assert refusal is not None and "4 tasks must run at once, and the nodes hold 3 (prepare.concurrency: 3)" in str(refusal)


@pytest.mark.parametrize("labels", [{"pool": "in(a"}, {"pool": "a b"}, {"": "x"}, {"pool": ""}, {"a b": "x"}])
def test_malformed_selectors_are_refused_as_ray_does(labels: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="a label is written as value, !value, in"):
        PrepareSpec(labels=labels)
    with pytest.raises(ValidationError, match=r"CPU and memory are prepare\.cpus and prepare\.memory"):
        PrepareSpec(resources={"memory": 1.0})


def test_joined_cluster_and_own_machine_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.flows.preflight.checks.refuse_unfit_nodes", lambda *_: None)
    monkeypatch.setattr("penstock.flows.preflight.checks.os.sched_getaffinity", lambda _pid: range(4))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = make_project(tmp_path / "p", files=1)
    cluster = RayCluster("head:6379", False, tuple(n.resources for n in NODES), None, tuple(n.labels for n in NODES))
    loaded = load_spec(file, ["prepare={labels: {pool: cpu}, concurrency: 4}"])
    check_cluster(loaded.project, cluster, reads_sources=True)
    shown = describe_preparing(loaded.spec, cluster)
    assert shown is not None and shown["nodes"] == 1 and shown["labels"] == {"pool": "cpu"}
    assert format_preparing(shown) == "tasks on nodes with pool=cpu, at most 4 at once; 1 node, 4 tasks at once"
    with pytest.raises(PreflightError, match="no node has pool=cpu; the nodes have no labels"):
        check_machine(loaded.spec)
    with pytest.raises(PreflightError, match="no node has pool=cpu"):
        plan_pipeline(loaded)
    nowhere = load_spec(file, ["prepare.labels={pool: tpu}"]).project
    check_cluster(nowhere, cluster, reads_sources=False)
    with pytest.raises(PreflightError, match="no node has pool=tpu"):
        check_cluster(nowhere, cluster, reads_sources=True)
    streams = load_spec(file, ["prepare.concurrency=1", "materialize.cache=none", "shuffle.mode=windowed"]).project
    with pytest.raises(PreflightError, match="tasks must run at once"):
        check_cluster(streams, cluster, reads_sources=True)
    lanes = ["prepare.concurrency=5", "materialize.cache=none", "shuffle.mode=windowed", "train.workers=2"]
    with pytest.raises(
        SpecError, match=r"2 workers, which prepare lanes of their own, run up to 6 tasks at once; use 6 or more"
    ):
        load_spec(file, lanes)
    assert load_spec(file, [*lanes, "shuffle.lanes=1"]) and load_spec(file, [*lanes, "prepare.concurrency=6"])
    wide = load_spec(file, ["prepare.cpus=3"])
    check_machine(wide.spec)
    assert cpus_needed(wide.spec) >= 3 and plan_pipeline(wide)["prepare"] == {"cpus": 3.0, "text": "tasks of 3 CPUs"}
    with pytest.raises(PreflightError, match="a task takes 5 CPU, and the largest node has 4"):
        check_machine(load_spec(file, ["prepare.cpus=5"]).spec)


def test_cache_memory_is_judged_by_preparing_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.flows.preflight.checks.refuse_unfit_nodes", lambda *_: None)
    monkeypatch.setattr("penstock.flows.preflight.checks.psutil.virtual_memory", lambda: SimpleNamespace(available=0))
    loaded = load_spec(make_project(tmp_path / "p", files=1), ["materialize.cache=memory", "prepare.labels={pool: cpu}"])
    size = sum(file.size_bytes for file in loaded.project.files)

    def cluster(*stores: float) -> RayCluster:
        nodes = tuple({**node.resources, "object_store_memory": store} for node, store in zip(NODES, stores, strict=True))
        return RayCluster("head:6379", False, nodes, None, tuple(node.labels for node in NODES))

    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert check_resources(loaded.project) == []
    check_cluster(loaded.project, cluster(3.0 * size, 0, 0), reads_sources=True)
    with pytest.raises(PreflightError, match="in the object stores of the 1 node that can prepare rows"):
        check_cluster(loaded.project, cluster(2.0 * size, 9.0 * size, 9.0 * size), reads_sources=True)
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(PreflightError, match=r"0\.0 GB is free here"):
        check_resources(loaded.project)


@pytest.mark.usefixtures("ray_cluster")
def test_tasks_count_rows_bytes_and_time_by_node(tmp_path: Path) -> None:
    files = {f"train/{name}.parquet": pa.table({"x": range(1000)}) for name in "ab"}
    source, found = Source.of(tmp_path, files, [{"standard_scaler": {"columns": ["x"]}}]), TaskCounts()
    of = {stage: partial(ray_map, count=partial(found.add, stage)) for stage in ("read", "preprocess", "materialize")}
    read_source(source.data, listed(source.data, source.folder), silent, parallel=of["read"])
    source.materialize(parallel=of["materialize"], fitted=source.fit(of["preprocess"]))
    for stage in of:
        ((node, counts),) = found.of(stage).items()
        assert node == socket.gethostname() and counts["rows"] == 2000 and counts["bytes"] > 0 and counts["wall_s"] > 0
    assert found.of("materialize")[node]["tasks"] == 2
    assert 16_000 <= found.of("materialize")[node]["bytes"] < 17_000
    assert found.of("train") == {}


@pytest.mark.usefixtures("ray_cluster")
def test_ray_runs_tasks_where_chosen_and_no_more_at_once(tmp_path: Path) -> None:
    def overlap(item: int) -> int:
        mark = tmp_path / f"{item}"
        mark.touch()
        time.sleep(0.05)  # so that a second task would overlap
        running = len(list(tmp_path.iterdir()))
        mark.unlink()
        return running

    (node,) = living_nodes()
    assert node.labels["pool"] == "cpu" and node.resources["prepares"] == 1
    one = PrepareSpec(cpus=0.5, memory=1_000_000, labels={"pool": "in(cpu, gpu)", "other": "!a"}, concurrency=1)
    by_resource = PrepareSpec(cpus=0.1, resources={"prepares": 1}, labels={"pool": "!gpu"})
    for where in (one, by_resource):
        assert set(ray_map(overlap, range(4), where=where)) == {1}
    import ray

    streams = ray_streams(lambda item: iter([overlap(item)]), range(4), where=by_resource)
    assert [ray.get(next(stream)) for stream in streams] == [1] * 4
    for refused in (PrepareSpec(labels={"pool": "gpu"}), PrepareSpec(resources={"tape": 1})):
        with pytest.raises(PreflightError, match="would wait for ever"):
            list(ray_map(abs, [1], where=refused))
        with pytest.raises(PreflightError, match="would wait for ever"):
            next(ray_streams(lambda item: iter([item]), [1], where=refused))


HELD = """
import os
class Held:
    def __init__(self, log):
        with open(log, "a") as file:
            file.write(f"{os.getpid()}\\n")
    def __call__(self, batch):
        return {**batch, "pid": batch["x"] * 0 + os.getpid()}
"""


@pytest.mark.usefixtures("ray_cluster")
def test_class_is_made_once_in_each_preparing_process(tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    log = tmp_path / "made"
    files = {f"train/{name}.parquet": pa.table({"x": [1, 2]}) for name in "abcdefgh"}
    source = Source.of(tmp_path, files, [{"map_batches": {"function": "held.py:Held", "params": {"log": str(log)}}}])
    manifest = source.materialize(parallel=ray_map)
    made = log.read_text().split()
    assert sorted(made) == sorted(set(made)) and {*map(str, source.column(manifest, "pid").tolist())} == set(made)


@pytest.mark.usefixtures("ray_cluster")
def test_process_with_gpu_ends_with_its_task() -> None:
    import ray

    def held(_item: int) -> tuple[int, list[int]]:
        return os.getpid(), ray.get_gpu_ids()

    found = list(ray_map(held, range(3), where=PrepareSpec(cpus=0.5).with_gpus(1)))
    assert len({pid for pid, _ in found}) == 3 and [gpus for _, gpus in found] == [[0]] * 3
    with pytest.raises(PreflightError, match=r"a task takes 2 GPU, and the largest node has 1"):
        list(ray_map(held, [1], where=PrepareSpec().with_gpus(2)))


TWO_NODES = """
import sys
from functools import partial
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from penstock.ingest.prepare import PrepareSpec
from penstock.ingest.ray_tasks import ray_map, ray_task

if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 9, "labels": {"pool": "gpu"}})
    cluster.add_node(num_cpus=9, labels={"pool": "cpu"}, resources={"prepares": 1})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    names = {node["NodeID"]: node["Labels"]["pool"] for node in ray.nodes()}

    def here(_item):
        return ray.get_runtime_context().get_node_id()

    chosen = (
        {"labels": {"pool": "cpu"}}, {"labels": {"pool": "!cpu"}}, {"labels": {"pool": "in(gpu, tpu)"}},
        {"resources": {"prepares": 1}},
    )
    for section in chosen:
        ran = ray_map(here, range(6), where=PrepareSpec.model_validate(section))
        print({names[node] for node in ran})

    def here_once(item):
        yield here(item)

    begun = [ray_task(ray.put(here_once), item) for item in range(4)]
    print(*sorted(names[node] for rows, _end in begun for node in ray.get(rows)))
"""


@pytest.mark.drill
def test_labels_choose_between_two_nodes_and_tasks_spread(tmp_path: Path) -> None:
    script = tmp_path / "two_nodes.py"
    script.write_text(TWO_NODES)
    ran = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    # Four small tasks have room on the first node, where Ray puts them unless they are to spread.
    assert ran.stdout.splitlines() == ["{'cpu'}", "{'gpu'}", "{'gpu'}", "{'cpu'}", "cpu cpu gpu gpu"], ran.stderr
