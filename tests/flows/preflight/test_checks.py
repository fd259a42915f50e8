"""Preflight refuses before a run spends anything, with the next step."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PreflightError, SpecError
from penstock.flows.pipeline import pipeline
from penstock.flows.preflight import nodes
from penstock.flows.preflight.checks import (
    FREE_AFTER_BYTES,
    Preflight,
    check_cluster,
    check_machine,
    check_resources,
    check_storage,
)
from penstock.flows.preflight.cpus import cpus_needed, workers_refused
from penstock.flows.preflight.nodes import NodeNeeds, check_node
from penstock.flows.run.request import RunRequest
from penstock.flows.servers.ray_local import RayCluster
from penstock.flows.spec_file import load_spec
from penstock.ingest.files.listing import SourceFile
from penstock.storage import Storage
from penstock.tasks.project import Project
from tests.drills.project import make_project


def project(tmp_path: Path, *overrides: str) -> Project:
    loaded = load_spec(make_project(tmp_path / "p", files=1, workers=2), overrides)
    return loaded.project


def test_unwritable_storage_is_named() -> None:
    with pytest.raises(PreflightError, match=r"storage /proc/no thing cannot be written") as caught:
        check_storage(Storage("/proc/no thing"))
    assert caught.value.exit_code == 3
    assert caught.value.next_step.startswith("make the folder writable")


def test_full_disk_error_names_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Storage, "write_bytes", full)
    with pytest.raises(PreflightError, match="its disk is full") as caught:
        check_storage(Storage(str(tmp_path)))
    assert caught.value.next_step == "free some space (268 MB must stay free), then run the same command"


def test_cluster_check_compares_versions_in_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_another_node(
        storage: Storage, versions: Mapping[str, str], _files: Sequence[SourceFile]
    ) -> dict[tuple[str, str], list[str]]:
        storage.write_bytes("probe/token", b"token")
        there = NodeNeeds(storage, "probe", b"token", versions=dict.fromkeys(versions, "0"))
        return {problem: ["node2"] for problem in check_node(there)}

    monkeypatch.setattr(nodes, "check_nodes", on_another_node)
    made = project(tmp_path, "train.framework=lightgbm", "train.recipe=null", "data.format=avro")
    transforms = made.base_dir / "transforms.py"
    transforms.write_text("import sklearn\n" + transforms.read_text() + "\n\nscale.made_with = sklearn.__version__\n")
    cluster = RayCluster("head:6379", embedded=False, nodes=({"CPU": 4.0},), most=None)
    with pytest.raises(PreflightError, match="1 node of the Ray cluster head:6379 cannot take part") as refused:
        check_cluster(made, cluster, reads_sources=False)
    named = {problem.split()[2] for problem in refused.value.problems}
    assert {"lightgbm", "fastavro", "scikit-learn"} <= named, "of the framework, of the format, and of the user's code"


def test_good_storage_is_unchanged(tmp_path: Path) -> None:
    check_storage(Storage(str(tmp_path)))
    assert os.listdir(tmp_path) == []


def test_small_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("penstock.flows.preflight.checks.shutil.disk_usage", lambda _path: Usage)
    with pytest.raises(PreflightError, match=r"0 MB free; .* 268 MB must stay free"):
        check_resources(project(tmp_path))


def test_committed_units_need_no_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = FREE_AFTER_BYTES + 10

    monkeypatch.setattr("penstock.flows.preflight.checks.shutil.disk_usage", lambda _path: Usage)
    started = project(tmp_path)
    with pytest.raises(PreflightError, match="must stay free"):
        check_resources(started)
    unit = Path(started.storage.root) / "units" / "u"
    unit.mkdir(parents=True)
    (unit / "train-00000.arrow").write_bytes(bytes(sum(file.size_bytes for file in started.files)))
    assert check_resources(started) == []


def test_unread_files_beside_source_are_a_warning(tmp_path: Path) -> None:
    started = project(tmp_path)
    beside = Path(started.files[0].uri).parent / "more.rows"
    beside.touch()
    warnings = check_resources(Project(started.spec, started.base_dir))
    assert [warning.partition(f": {beside}; ")[0] for warning in warnings] == [
        "1 file in the folders of the source is not read, because of the name"
    ]


def test_too_many_workers_or_gpus_refused_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.flows.preflight.checks.os.sched_getaffinity", lambda _pid: range(4))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_machine(project(tmp_path / "a", "train.workers=4", "train.cpus_per_worker=1", "train.batch_rows=64").spec)
    with pytest.raises(PreflightError, match=r"28 more CPUs: this machine has 4, train\.workers: 64 with .* 0\.5 needs 32"):
        check_machine(project(tmp_path / "b", "train.workers=64").spec)
    with pytest.raises(PreflightError, match=r"4 more CPUs: this machine has 4, 1 worker with .* 8 needs 8"):
        check_machine(project(tmp_path / "one", "train.workers=1", "train.cpus_per_worker=8").spec)
    with pytest.raises(PreflightError, match=r"for 1 more GPU: this machine has 1, train\.workers: 2 needs 2"):
        check_machine(project(tmp_path / "c", "train.gpus=1").spec)
    with pytest.raises(PreflightError, match=r"for 2 more tapes: this machine has 0"):
        check_machine(project(tmp_path / "d", "train.resources={tape: 1}").spec)
    check_machine(project(tmp_path / "e", "train.resources={memory: 1.0e+6}").spec)
    with pytest.raises(PreflightError, match=r"more bytes of memory: this machine has"):
        check_machine(project(tmp_path / "f", "train.resources={memory: 1.0e+15}").spec)


def test_workers_that_cluster_cannot_hold_are_refused(tmp_path: Path) -> None:
    spec = project(tmp_path, "train.workers=4", "train.cpus_per_worker=1").spec
    refusal = workers_refused(spec, [{"CPU": 2.0}])
    assert refusal is not None
    assert "for 2 more CPUs: the cluster has 2, train.workers: 4 needs 4" in refusal.message
    assert workers_refused(spec, [{"CPU": cpus_needed(spec)}]) is None
    assert workers_refused(spec, [{"CPU": 2.0}], {"CPU": 64.0}) is None, "an autoscaler brings more"
    wide = project(tmp_path / "wide", "train.workers=2", "train.cpus_per_worker=3").spec
    refusal = workers_refused(wide, [{"CPU": 4.0}, {"CPU": 2.0}])
    assert refusal is not None, "6 CPUs, but no node of 3 for the second worker"
    assert "there is room for 1, the nodes have 4 CPU; 2 CPU" in refusal.message


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_cpus_of_cache_fit_requested_cpus(tmp_path: Path, cache: str) -> None:
    overrides: list[Any] = [f"materialize.cache={cache}", "shuffle.mode=windowed"]
    spec = project(tmp_path, *overrides).spec
    assert workers_refused(spec, [{"CPU": cpus_needed(spec)}]) is None


def test_unusable_cache_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Storage("memory://preflight")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    check_storage(remote)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(PreflightError, match=r"the cache of shards .*file/cache cannot be written"):
        check_storage(remote)
    check_storage(Storage(str(tmp_path / "state")))  # whose rows need no cache
    for size in ("abc", "-5", "0"):
        monkeypatch.setenv("PENSTOCK_CACHE_BYTES", size)
        with pytest.raises(SpecError, match=f"PENSTOCK_CACHE_BYTES='{size}' is not a size"):
            check_storage(Storage(str(tmp_path / "state")))


def test_flow_reuses_checks_of_command(tmp_path: Path) -> None:
    preflight = Preflight(load_spec(make_project(tmp_path / "p", files=1, workers=2)))
    assert preflight.resources == [] and preflight.project.files
    request = RunRequest(file=str(preflight.loaded.file), until="read").made_here(preflight)
    taken = pipeline.validate_parameters({"request": request})["request"]
    assert taken.preflight() is preflight
    deployed = RunRequest.model_validate(request.model_dump(mode="json"))
    assert deployed.preflight() is not preflight and deployed.preflight().loaded.spec == preflight.loaded.spec
