"""A feed whose shards are being made: it waits for each, gives the batches of a whole dataset, and refuses other rows."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import DataError, ServiceError
from penstock.ingest.feed.cached import CachedFeed, open_cached_feed
from penstock.ingest.feed.pending import await_shard
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.tasks.overlap import units_by_use
from tests.ingest.preparing import Source

WAITS = """
import time
from pathlib import Path

import numpy as np

def waits(batch, folder):
    Path(folder, f"made-{int(batch['x'][0])}").touch()
    made = len(list(Path(folder).glob("made-*")))
    while made > 3 and not Path(folder, "stepped").exists():
        time.sleep(0.01)
    return {**batch, "_keep": np.arange(len(batch["x"])) > (0 if Path(folder, "short").exists() and made > 3 else -1)}
"""


def source(folder: Path) -> Source:
    """Eight units; the function waits in the fourth until a batch was read."""
    folder.mkdir(exist_ok=True)
    (folder / "waits.py").write_text(WAITS)
    files = {f"train/{unit}.parquet": pa.table({"x": np.arange(20.0) + 20 * unit}) for unit in range(8)}
    return Source.of(folder, files, [{"map_batches": {"function": "waits.py:waits", "params": {"folder": str(folder)}}}])


def open_feed(storage: Storage, manifest: DatasetManifest) -> CachedFeed:
    spec = ShuffleSpec(mode="windowed", window_of="shards", window_rows=40, lanes=1, seed=3)
    order = make_order(spec, manifest.rows["train"], manifest.opened(storage).shards_of("train").rows)
    return open_cached_feed([(storage, manifest)], "train", batch_rows=8, order=order)


def overlapped(of: Source, work: Any) -> list[Any]:
    """Prepare `of` in a thread; call `work` with the predicted dataset, as a worker has it, meanwhile."""
    begun: SimpleQueue[DatasetManifest | None] = SimpleQueue()

    def begin(predicted: DatasetManifest) -> list[str]:
        begun.put(DatasetManifest.model_validate(predicted.model_dump(mode="json")))
        return units_by_use(open_feed(of.storage, predicted).order, predicted)

    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(of.materialize, begin=begin)
        making.add_done_callback(lambda _made: begun.put(None))
        try:
            predicted = begun.get(timeout=60)
            return [work(predicted) if predicted is not None else making.result(), making]
        finally:
            (of.folder / "stepped").touch()


@pytest.mark.parametrize("scheme", ["", "local://"], ids=["local", "remote"])
def test_feed_reads_rows_while_others_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    of = source(tmp_path / "early")
    storage = Storage(f"{scheme}{of.storage.root}")  # as the feed sees it
    assert storage.is_local != bool(scheme)

    def read(predicted: DatasetManifest) -> list[Any]:
        found = []
        for batch in open_feed(storage, predicted).batches(0):
            found.append((batch.row_ids.tolist(), batch.columns["x"].tolist()))
            (of.folder / "stepped").touch()  # without a batch before, the fourth unit waits for ever
        return found

    early, making = overlapped(of, read)
    made = making.result()
    assert early == [(batch.row_ids.tolist(), batch.columns["x"].tolist()) for batch in open_feed(storage, made).batches(0)]
    assert len(early) == 20


def test_feed_refuses_a_unit_of_other_rows(tmp_path: Path) -> None:
    of = source(tmp_path / "short")
    (of.folder / "short").touch()

    def read(predicted: DatasetManifest) -> None:
        for _ in open_feed(of.storage, predicted).batches(0):
            (of.folder / "stepped").touch()

    with pytest.raises(DataError, match=r"was expected to have 20 rows; the shards of the unit's rows of train have \[19\]"):
        overlapped(of, read)


def test_wait_for_a_unit_that_is_not_made_has_an_end(tmp_path: Path) -> None:
    of = source(tmp_path)
    (of.folder / "stepped").touch()
    manifest = of.materialize(begin=lambda _predicted: ())
    shard = manifest.shards[0].model_copy(update={"digest": bytes(16).hex()})
    assert await_shard(of.storage, shard) == manifest.shards[0]
    of.storage.delete(f"units/{shard.unit}/unit.json")
    with pytest.raises(ServiceError, match=f"{shard.unit}/unit.json is not there after 0 s"):
        await_shard(of.storage, shard, most_s=0.01)
