"""A finished dataset is believed without being read through where this machine wrote it, and what is damaged is still found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
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


@pytest.mark.parametrize("one_by_one", [0, 1000])
@pytest.mark.parametrize("gone", ["units/{unit}/unit.json", "{path}"])
def test_missing_file_of_store_found_for_few_and_many_units(
    tmp_path: Path, one_by_one: int, gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ingest.materialize.build._UNITS_LISTED_ONE_BY_ONE", one_by_one)
    monkeypatch.setattr("penstock.ingest.materialize.build._SHARDS_AT_ONCE", 2)
    files = {f"train/{n}.parquet": pa.table({"x": np.arange(4.0) + n}) for n in range(3)}
    source = Source.of(tmp_path, files)
    manifest, store = source.materialize(), Storage(f"local://{source.storage.root}")
    assert damaged_shards(store, manifest, deep=True) == []
    lost = manifest.shards[1]
    source.storage.delete(gone.format(unit=lost.unit, path=lost.path))
    assert damaged_shards(store, manifest, deep=True) == [lost]
