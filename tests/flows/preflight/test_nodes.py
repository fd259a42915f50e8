"""Which problems does a node of a cluster find: storage, sources, keys, versions and disk?

tests/drills/test_unshared_storage.py checks the nodes of a real cluster.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from pathlib import Path

import pytest

from penstock.errors import ServiceError
from penstock.flows.preflight import nodes
from penstock.flows.preflight.nodes import NodeNeeds, check_node, check_nodes, installed_versions
from penstock.flows.servers.services import ray_cluster
from penstock.storage import Storage
from penstock.stores import store_problem


def written(storage: Storage) -> NodeNeeds:
    storage.write_bytes("probe/token", b"token")
    return NodeNeeds(storage, "probe", b"token")


def test_fit_node_has_no_problem(tmp_path: Path) -> None:
    needs = written(Storage(str(tmp_path)))
    files = [(str(tmp_path / "probe" / "token"), 5)]
    assert check_node(NodeNeeds(needs.storage, "probe", b"token", files, installed_versions())) == []
    assert os.listdir(tmp_path) == ["probe"]


def test_storage_that_is_not_shared_is_found(tmp_path: Path) -> None:
    ((what, fix),) = check_node(NodeNeeds(Storage(str(tmp_path / "own")), "probe", b"token"))
    assert what.startswith(f"does not see storage {tmp_path / 'own'}, which is a folder of the machine")
    assert "a folder that every node mounts" in fix
    assert list(tmp_path.iterdir()) == [], "what is not shared is left as it was"
    written(Storage(str(tmp_path)))
    assert len(check_node(NodeNeeds(Storage(str(tmp_path)), "probe", b"of another run"))) == 1
    ((what, fix),) = check_node(NodeNeeds(Storage("memory://nodes"), "probe", b"token"))
    assert what == "reaches another store as memory://nodes: what is written here is not there"
    assert "AWS_ACCESS_KEY_ID" in fix and "`ray start`" in fix


def test_read_only_storage_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = written(Storage(str(tmp_path)))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Storage, "write_bytes", refuse)
    assert [what for what, _ in check_node(needs)] == [f"storage {tmp_path} cannot be written: Permission denied"]


def test_missing_or_different_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    files = [(str(tmp_path / "a.csv"), 400), (str(tmp_path / "b.csv"), 4)]
    needs = written(Storage(str(tmp_path / "state")))
    assert [what for what, _ in check_node(dataclasses.replace(needs, files=files))] == [
        f"sees another file as {tmp_path / 'a.csv'}: it has 4 bytes, here 400",
        f"does not see {tmp_path / 'b.csv'}, which this command reads",
    ]


def test_other_version_is_a_problem_other_build_is_not(tmp_path: Path) -> None:
    needs = written(Storage(str(tmp_path)))
    here = installed_versions()
    other_build = {**here, "torch": f"{here['torch'].partition('+')[0]}+cu999"}
    assert check_node(dataclasses.replace(needs, versions=other_build)) == []
    ((what, _),) = check_node(dataclasses.replace(needs, versions={**here, "pyarrow": "1.0.0"}))
    assert what == f"has pyarrow {here['pyarrow']}; here it is 1.0.0"
    ((what, _),) = check_node(dataclasses.replace(needs, versions={"no-such-library": "2"}))
    assert what == "has no-such-library absent; here it is 2"


def test_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1_000_000

    monkeypatch.setattr(nodes.shutil, "disk_usage", lambda _: Usage)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    assert [what for what, _ in check_node(written(Storage(str(tmp_path))))] == [f"has 1 MB free in {tmp_path}; 268 MB must be"]
    found = [what for what, _ in check_node(written(Storage("memory://room")))]
    assert found[0] == f"has 1 MB free in {tmp_path / 'cache'}; 268 MB must be"
    assert len(found) == 2  # and the temporary folder, where shards are made


def test_credentials_error_names_the_machine() -> None:
    for said in ("An error occurred: Forbidden", "Unable to locate credentials"):
        error = store_problem("s3://pipe/a/b", PermissionError(said))
        assert f"bucket 'pipe', key 'a/b', asked by {socket.gethostname()}:" in error.message
        assert f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY on {socket.gethostname()}" in error.next_step
        assert "`ray start`" in error.next_step


def test_token_that_cannot_be_deleted_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Undeletable(Storage):
        def delete(self, path: str) -> None:
            raise ServiceError("503")

    monkeypatch.setattr(nodes, "_working_nodes", dict)
    assert check_nodes(Undeletable(str(tmp_path)), {}) == {}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["token"]


def test_each_node_is_checked_and_a_slow_one_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ray_cluster(tmp_path / "state"):
        storage = Storage(str(tmp_path / "shared"))
        assert check_nodes(storage, installed_versions()) == {}
        (((what, _), names),) = check_nodes(storage, {"pyarrow": "1.0.0"}).items()
        monkeypatch.setattr(nodes, "check_node", lambda _needs: time.sleep(3) or [])
        assert check_nodes(storage, {}) == {}
        monkeypatch.setattr(nodes, "TIMEOUT_S", 0.5)
        (((late, _), _names),) = check_nodes(storage, {}).items()
    assert f"waiting for {socket.gethostname()} (" in capsys.readouterr().err
    assert late == "has not answered within 0.5 s"
    (name,) = names
    assert name.startswith(socket.gethostname()) and what.endswith("here it is 1.0.0")
    assert list((tmp_path / "shared").iterdir()) == []
