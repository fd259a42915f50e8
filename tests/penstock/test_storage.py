"""Writes become visible all at once, and nothing leaves the root."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.client import AioBaseClient
from fsspec import AbstractFileSystem
from s3fs import S3FileSystem

from penstock.errors import ServiceError
from penstock.storage import Storage


def test_written_file_reads_back_and_lists_alone(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.write_json("a/b.json", {"x": [1, 2.5, "ü"]})
    (tmp_path / "a" / ".c.json.1234.tmp").write_text("half")
    assert storage.read_json("a/b.json") == {"x": [1, 2.5, "ü"]}
    assert storage.list("a") == ["b.json"]
    assert storage.list("absent") == []
    assert (storage.sizes(), storage.sizes("absent")) == ({}, {})
    assert storage.sizes("a")["b.json"] == (tmp_path / "a" / "b.json").stat().st_size
    assert storage.child("a").exists("b.json")


def test_create_exclusive_has_one_winner(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda i: storage.create_exclusive("x/lock", str(i).encode()), range(64)))
    assert won.count(True) == 1
    assert storage.read_bytes("x/lock").decode() == str(won.index(True))


def test_missing_bucket_is_an_error_of_the_store(s3_bucket: str) -> None:
    with pytest.raises(ServiceError, match=f"bucket '{s3_bucket.removeprefix('s3://')}-gone', key 'x/lock'") as refused:
        Storage(f"{s3_bucket}-gone").create_exclusive("x/lock", b"")
    assert "the name of the bucket" in refused.value.next_step


@pytest.mark.parametrize("write", [Storage.write_bytes, Storage.create_exclusive])
def test_failed_write_keeps_old_file_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Storage, str, bytes], object]
) -> None:
    storage = Storage(str(tmp_path))
    storage.write_bytes("f", b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.storage.os.fsync", full)
    with pytest.raises(OSError, match="No space") as caught:
        write(storage, "f", b"new and longer")
    assert caught.value.filename == str(tmp_path / "f")
    assert storage.read_bytes("f") == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("path", ["../etc/passwd", "/etc/passwd"])
def test_path_outside_root_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="leaves the storage root"):
        Storage(str(tmp_path)).read_bytes(path)


def test_pickled_storage_is_its_uri(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.write_bytes("f", b"1")
    assert pickle.loads(pickle.dumps(storage)).read_bytes("f") == b"1"


@pytest.mark.parametrize("root", ["", "memory://deleted-together"])
def test_files_deleted_together_leave_others(tmp_path: Path, root: str) -> None:
    storage = Storage(root or str(tmp_path))
    for name in ("a/1.json", "a/2.json", "a/3.json"):
        storage.write_json(name, {})
    storage.delete_files(["a/1.json", "a/3.json"])
    assert [*storage.tree()] == ["a/2.json"]


@pytest.mark.s3
def test_storage_on_object_store_reads_back(s3_bucket: str) -> None:
    storage = Storage(f"{s3_bucket}/prefix")
    assert storage.list() == []
    assert storage.create_exclusive("lock", b"1")
    assert not storage.create_exclusive("lock", b"2")
    storage.write_json("a/b.json", {"x": 1})
    assert storage.read_json("a/b.json") == {"x": 1}
    assert storage.list() == ["a", "lock"]
    assert (storage.sizes(), storage.sizes("absent")) == ({"lock": 1}, {})
    storage.delete("a")
    assert storage.list() == ["lock"]
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("a/b.json")


@pytest.mark.s3
def test_listing_and_reading_cost_one_request_each(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, requests, call = Storage(f"{s3_bucket}/prefix"), list[str](), AioBaseClient._make_api_call
    storage.write_bytes("units/a/unit.json", b"{}")
    storage.write_bytes("units/a/0.arrow", b"rows")

    def counted(self: AioBaseClient, operation: str, arguments: dict[str, Any]) -> Any:
        requests.append(operation)
        return call(self, operation, arguments)

    monkeypatch.setattr(AioBaseClient, "_make_api_call", counted)
    assert storage.list("absent") == [] and storage.tree("absent") == {} and storage.sizes("absent") == {}
    assert storage.small_tree("units") == storage.tree("units") == {"units/a/0.arrow": 4, "units/a/unit.json": 2}
    assert storage.small_tree("units", most=2) is None and storage.read_bytes("units/a/0.arrow", in_one=True) == b"rows"
    assert requests == ["ListObjectsV2"] * 6 + ["GetObject"]


def test_unreachable_store_error_names_setting(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(f"{s3_bucket}/prefix")
    storage.write_bytes("a", b"1")
    bucket = s3_bucket.removeprefix("s3://")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    forget_clients()
    with pytest.raises(ServiceError, match=f"refuses the credentials for bucket '{bucket}', key 'prefix/a'") as refused:
        Storage(storage.root).read_bytes("a")
    assert "AWS_SECRET_ACCESS_KEY" in refused.value.next_step
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # or the client tries each operation for seconds
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        forget_clients()
        away = Storage(storage.root)
        for operation in (away.read_bytes, away.list, away.exists, away.delete, lambda path: away.write_bytes(path, b"2")):
            with pytest.raises(ServiceError, match="AWS_ENDPOINT_URL"):
                operation("a")


def forget_clients() -> None:
    """fsspec keeps filesystems by their arguments, and endpoint and keys come from the environment."""
    for kind in (AbstractFileSystem, S3FileSystem):
        kind.clear_instance_cache()


def test_moved_file_has_the_mode_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o775)
    private = tmp_path / "model.safetensors"
    private.touch(0o600)
    Storage(str(tmp_path)).put_file(private, "run/model.safetensors")
    assert (tmp_path / "run" / "model.safetensors").stat().st_mode & 0o777 == 0o664
