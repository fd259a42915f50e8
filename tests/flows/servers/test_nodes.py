"""What does a node of a cluster find when it looks around: storage, sources, keys, versions and room?

tests/drills/test_unshared_storage.py asks the nodes of a real cluster.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from penstock.errors import ServiceError
from penstock.flows.servers import nodes
from penstock.flows.servers.nodes import NodeNeeds, ask_nodes, installed_versions, what_is_missing
from penstock.storage import Storage
from penstock.stores import store_problem


def written(storage: Storage) -> NodeNeeds:
    storage.write_bytes("probe/token", b"token")
    return NodeNeeds(storage, "probe", b"token")


def test_a_node_that_sees_what_the_driver_wrote_and_has_all_it_needs_says_nothing(tmp_path: Path) -> None:
    needs = written(Storage(str(tmp_path)))
    files = [(str(tmp_path / "probe" / "token"), 5)]
    assert what_is_missing(NodeNeeds(needs.storage, "probe", b"token", files, installed_versions())) == []
    assert os.listdir(tmp_path) == ["probe"]


def test_another_folder_or_store_under_the_same_name_is_found(tmp_path: Path) -> None:
    ((what, fix),) = what_is_missing(NodeNeeds(Storage(str(tmp_path / "own")), "probe", b"token"))
    assert what.startswith(f"does not see storage {tmp_path / 'own'}, which is a folder of the machine")
    assert "a folder that every node mounts" in fix
    assert list(tmp_path.iterdir()) == [], "what is not shared is left as it was"
    written(Storage(str(tmp_path)))
    assert len(what_is_missing(NodeNeeds(Storage(str(tmp_path)), "probe", b"of another run"))) == 1
    ((what, fix),) = what_is_missing(NodeNeeds(Storage("memory://nodes"), "probe", b"token"))
    assert what == "reaches another store as memory://nodes: what is written here is not there"
    assert "AWS_ACCESS_KEY_ID" in fix and "`ray start`" in fix


def test_a_storage_that_a_node_may_only_read_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = written(Storage(str(tmp_path)))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Storage, "write_bytes", refuse)
    assert [what for what, _ in what_is_missing(needs)] == [f"storage {tmp_path} cannot be written: Permission denied"]


def test_sources_that_are_missing_or_others_on_a_node_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    files = [(str(tmp_path / "a.csv"), 400), (str(tmp_path / "b.csv"), 4)]
    assert [what for what, _ in what_is_missing(NodeNeeds(None, "", b"", files))] == [
        f"sees another file as {tmp_path / 'a.csv'}: it has 4 bytes, here 400",
        f"does not see {tmp_path / 'b.csv'}, which this command reads",
    ]


def test_another_version_is_named_and_another_build_of_it_is_none() -> None:
    here = installed_versions()
    other_build = {**here, "torch": f"{here['torch'].partition('+')[0]}+cu999"}
    assert what_is_missing(NodeNeeds(None, "", b"", versions=other_build)) == []
    ((what, _),) = what_is_missing(NodeNeeds(None, "", b"", versions={**here, "pyarrow": "1.0.0"}))
    assert what == f"has pyarrow {here['pyarrow']}; here it is 1.0.0"
    ((what, _),) = what_is_missing(NodeNeeds(None, "", b"", versions={"no-such-library": "2"}))
    assert what == "has no-such-library absent; here it is 2"


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1_000_000

    monkeypatch.setattr(nodes.shutil, "disk_usage", lambda _: Usage)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    assert [what for what, _ in what_is_missing(written(Storage(str(tmp_path))))] == [
        f"has 1 MB free in {tmp_path}; 268 MB must be"
    ]
    found = [what for what, _ in what_is_missing(written(Storage("memory://room")))]
    assert found[0] == f"has 1 MB free in {tmp_path / 'cache'}; 268 MB must be"
    assert len(found) == 2  # and the temporary folder, where shards are made


def test_an_error_about_credentials_names_the_machine_that_asked() -> None:
    for said in ("An error occurred: Forbidden", "Unable to locate credentials"):
        error = store_problem("s3://pipe/a/b", PermissionError(said))
        assert f"bucket 'pipe', key 'a/b', asked by {socket.gethostname()}:" in error.message
        assert f"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY on {socket.gethostname()}" in error.next_step
        assert "`ray start`" in error.next_step


def test_a_token_that_cannot_be_deleted_does_not_end_the_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Undeletable(Storage):
        def delete(self, path: str) -> None:
            raise ServiceError("503")

    monkeypatch.setattr(nodes, "_working_nodes", list)
    assert ask_nodes(Undeletable(str(tmp_path)), {}) == []
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["token"]
