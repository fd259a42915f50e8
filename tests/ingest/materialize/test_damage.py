"""A finished dataset is believed without being read through where this machine wrote it, and what is damaged is still found."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.ingest.files import content_digests
from penstock.ingest.materialize.build import damaged_shards
from penstock.ingest.open_feed import open_feed
from penstock.storage import Storage
from tests.ingest.preparing import ONE_FILE_PER_UNIT, Source


def test_new_shards_are_not_read_for_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"train/{name}.parquet": pa.table({"x": [1.0, 2.0]}) for name in "ab"}
    source, storage = Source.of(tmp_path / "source", files), Storage(str(tmp_path / "out"))
    manifest = source.materialize(storage, spec=ONE_FILE_PER_UNIT)
    read: list[object] = []
    real = content_digests.file_digest
    monkeypatch.setattr(content_digests, "file_digest", lambda path: (read.append(path), real(path))[1])
    monkeypatch.setattr(content_digests, "_seen", {})  # as another process of this machine
    assert damaged_shards(storage, manifest, deep=True) == []
    open_feed(storage.uri(f"datasets/{manifest.key}"), batch_rows=1)
    assert read == []
    shard = tmp_path / "out" / manifest.shards[1].path
    content = shard.read_bytes()
    shard.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert damaged_shards(storage, manifest, deep=True) == [manifest.shards[1]]
    assert len(read) == 1
