"""A store is asked for many things at a time: what waits until all have been asked would wait for ever otherwise."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock.ingest.files.listing import list_location
from penstock.ingest.materialize.build import damaged_shards
from penstock.ingest.read.snapshot import iterate_rows
from penstock.storage import Storage
from tests.ingest.preparing import Source
from tests.ingest.reading import read_snapshot

FILES = 5


class Gated(MemoryFileSystem):
    """Keeps some calls until `FILES` of them have come."""

    protocol = "gated"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    kept: ClassVar[tuple[str, str]] = ("", "")
    """The method, and the end of its path."""
    gate: ClassVar[threading.Barrier] = threading.Barrier(FILES)
    passed: ClassVar[int] = 0

    @classmethod
    @contextmanager
    def keep(cls, method: str, end: str = "") -> Iterator[None]:
        """Within the block; it must come to some that pass."""
        cls.kept, cls.gate, cls.passed = (method, end), threading.Barrier(FILES, timeout=30), 0
        try:
            yield
        finally:
            cls.kept = ("", "")
        assert cls.passed > 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("gated://", "memory://")))

    def _pass(self, method: str, path: str) -> None:
        if self.kept[0] == method and path.endswith(self.kept[1]):
            self.gate.wait()
            Gated.passed += 1

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._pass("ls", path)
        return super().ls(path, detail, **options)

    def find(self, path: str, **options: Any) -> Any:  # type: ignore[override]
        self._pass("find", path)
        return super().find(path, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._pass("info", path)
        # Which `find` gives as another type.
        return {name: value for name, value in super().info(path, **options).items() if name != "created"} | {
            "created": self.created(path).timestamp()
        }

    def cat_file(self, path: str, **options: Any) -> Any:  # type: ignore[override]
        self._pass("cat_file", path)
        return super().cat_file(path, **options)

    def _open(self, path: str, *args: Any, **options: Any) -> Any:
        self._pass("open", path)
        return super()._open(path, *args, **options)


fsspec.register_implementation("gated", Gated, clobber=True)


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    Gated.store.clear()


@pytest.fixture
def texts() -> str:
    for number in range(FILES):
        Gated().pipe_file(f"/lake/texts/{number}.txt", b"some text")
    return "gated://lake/texts/"


def test_about_logs_of_tables(texts: str) -> None:
    with Gated.keep("ls"):  # one for each kind of table
        assert len(list_location("text", (".txt",), Path(), texts).files) == FILES


def test_for_files_to_look_through_and_for_what_says_whether_they_changed(texts: str) -> None:
    with Gated.keep("open"):
        data, snapshot = read_snapshot(Path(), "text", train=texts, text={"rows": "file"})
    with Gated.keep("info"):
        (batch,) = iterate_rows(data, snapshot, snapshot.files)
    assert batch.table.num_rows == FILES


def test_for_units_that_are_there_and_for_their_shards(tmp_path: Path) -> None:
    source = Source.of(tmp_path, {f"train/{number}.parquet": pa.table({"x": [number]}) for number in range(FILES)})
    storage = Storage("gated://state")
    manifest = source.materialize(storage)
    with Gated.keep("cat_file", "/unit.json"):
        assert source.materialize(storage) == manifest
    with Gated.keep("ls"):
        assert damaged_shards(storage, manifest, deep=False) == []
