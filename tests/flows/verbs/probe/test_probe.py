"""Is the place named that makes reading slow? Pipelines made slow on purpose in one place each, read by a dummy trainer."""

from __future__ import annotations

import bz2
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from penstock.flows.verbs.probe.clock import counting
from penstock.flows.verbs.probe.probe import ADVICE
from penstock.flows.verbs.probe.reading import read_rank, summarize
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.feed.stream import StreamFeed
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.phases import phase, timed
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.schema import Split
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.training.job import TrainJob
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture
from tests.conformance.feed_cases import write_dataset
from tests.ingest.preparing import Source
from tests.training.digits import CPU, ListClient

RECIPE = """
import time


class Plain:
    def build_model(self, schema):
        raise AssertionError("a probe makes no model")

    def loss(self, model, batch):
        raise AssertionError("a probe learns nothing")


class Augments(Plain):
    def augment(self, batch, generator):
        time.sleep(0.02)
        return batch
"""
SLOW_S = 0.2


@dataclass(frozen=True)
class Streamed:
    """A stream that is prepared in this process: the same feed as on Ray, without its tasks."""

    preparation: Preparation

    def __call__(self, job: TrainJob, split: Split, rank: int, world_size: int) -> Feed:
        def tables(_epoch: int, _row: int) -> tuple[int, Iterator[pa.Table]]:
            return 0, (table for found, table in self.preparation.tables() if found == split)

        schema, order = job.manifest.feed_schema, job.order
        return StreamFeed(tables, schema, split, content="c", batch_rows=job.spec.batch_rows, order=order)


def read(
    folder: Path, data: Storage, manifest: DatasetManifest, recipe: str = "Plain", *, shuffle: Any = "none", **job: Any
) -> dict[str, Any]:
    """What `penstock probe` would say of the dataset, read by one worker."""
    (folder / "model.py").write_text(RECIPE)
    made = TrainJob(
        run_storage=Storage(str(folder / "scratch")),
        data_storage=data,
        manifest=manifest,
        order=make_order(ShuffleSpec(mode=shuffle), manifest.rows["train"]),
        spec=TrainSpec(recipe=f"model.py:{recipe}", batch_rows=job.pop("batch_rows", 64)),
        seed=0,
        code=capture(f"model.py:{recipe}", folder),
        attempt=1,
        pipeline="p",
        **job,
    )
    read = read_rank(made, Group(0, 1, CPU), ListClient())
    return summarize(read.returned, sum(s.size_bytes for s in manifest.shards_of("train")))


def test_a_storage_with_delay_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = slow_storage(tmp_path, monkeypatch)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    seen = read(tmp_path, storage, write_dataset(Storage(str(tmp_path / "storage")), tmp_path / "made", 12))
    assert seen["place"] == "fetch", seen["time"]
    assert seen["fetched_bytes"] == seen["split_bytes"], "each shard once"
    assert list(seen["fetched_by_node"].values()) == [seen["split_bytes"]]
    assert seen["first_batch_s"] >= SLOW_S


def slow_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A remote storage, over files of `tmp_path/storage`, which takes its time for each of them."""
    fetch = Storage.get_file

    def slowly(self: Storage, path: str, local: Path) -> None:
        time.sleep(SLOW_S)  # the delay that is to be found
        fetch(self, path, local)

    monkeypatch.setattr(Storage, "get_file", slowly)
    return Storage(f"local://{tmp_path / 'storage'}")


def test_a_node_cache_that_is_too_small_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = slow_storage(tmp_path, monkeypatch)
    manifest = write_dataset(Storage(str(tmp_path / "storage")), tmp_path / "made", 12)
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    largest = max(shard.size_bytes for shard in manifest.shards)
    monkeypatch.setenv("PENSTOCK_CACHE_BYTES", str(4 * largest))
    seen = read(tmp_path, storage, manifest)
    assert seen["place"] == "fetch", (seen["time"], seen["fetched_bytes"], seen["split_bytes"])
    assert seen["fetched_bytes"] > 1.5 * seen["split_bytes"]
    assert "PENSTOCK_CACHE_BYTES" in ADVICE[seen["place"]]


def images(folder: Path, steps: list[Any]) -> Source:
    """Six pictures in Parquet, large enough that decoding them is what takes the time."""
    noise = np.random.default_rng(0).integers(0, 255, (700, 700, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "JPEG", quality=95)
    table = pa.table({"image": pa.array([stream.getvalue()] * 24, pa.binary()), "label": [0, 1] * 12})
    return Source.of(folder, {"train/a.parquet": table}, steps, label="label", images={"size": [32, 32]})


@pytest.mark.parametrize("cache", ["disk", "none"])
def test_slow_decoding_is_named(tmp_path: Path, cache: str) -> None:
    source = images(tmp_path, [{"decode_image": {"column": "image", "keep": "encoded" if cache == "disk" else "pixels"}}])
    manifest = source.materialize()
    streams = {"open_feeds": Streamed(source.preparation())} if cache == "none" else {}
    seen = read(tmp_path, source.storage, manifest, batch_rows=4, **streams)
    assert seen["place"] == "decode", seen["time"]


SLOW_STEP = "import time\n\ndef slow(batch):\n    time.sleep(0.1)\n    return batch\n"


def test_a_slow_step_of_a_stream_is_named(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(SLOW_STEP)
    table = pa.table({"x": np.arange(20_000.0), "label": np.arange(20_000) % 2})
    source = Source.of(tmp_path, {"train/a.parquet": table}, [{"map_batches": "steps.py:slow"}], label="label")
    seen = read(tmp_path, source.storage, source.materialize(), open_feeds=Streamed(source.preparation()))
    assert seen["place"] == "transform", seen["time"]
    assert seen["time"]["transform"] > 0.5


def test_slow_parsing_of_a_stream_is_named(tmp_path: Path) -> None:
    text = "x,y\n" + "\n".join(f"{i % 97 / 7},{i % 31 / 3}" for i in range(60_000))
    source = Source.of(tmp_path, {"train/a.csv.bz2": bz2.compress(text.encode())}, format="csv")
    seen = read(tmp_path, source.storage, source.materialize(), open_feeds=Streamed(source.preparation()), batch_rows=20_000)
    assert seen["place"] == "read", seen["time"]


def test_a_slow_augmentation_is_named(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "storage"))
    seen = read(tmp_path, storage, write_dataset(storage, tmp_path / "made", 2), "Augments")
    assert seen["place"] == "augment", seen["time"]
    assert seen["p50_s"] >= 0.02 and seen["p95_s"] >= seen["p50_s"] and seen["longest_s"] >= seen["p95_s"]


def test_gather_of_large_rows_is_named_and_shares_add_up(tmp_path: Path) -> None:
    wide = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4000 * 2000, np.float32)), 2000)})
    source = Source.of(tmp_path, {"train/a.parquet": wide})
    manifest = source.materialize()
    seen = read(tmp_path, source.storage, manifest, shuffle="global", batch_rows=256)
    assert seen["place"] == "gather", seen["time"]
    assert sum(seen["time"].values()) == pytest.approx(1.0, abs=0.02)
    assert seen["epochs"] >= 2 and seen["ranks"][0]["bytes"] == seen["ranks"][0]["rows"] * 8000


def test_each_second_counts_for_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    with counting() as clock:
        with phase("gather"):
            now_s[0] += 1
            with phase("fetch"):
                now_s[0] += 2
        assert [*timed("read", iter((1, 2)))] == [1, 2]
        seconds = clock.take()
    assert {name: spent_s for name, spent_s in seconds.items() if spent_s} == {"gather": 1, "fetch": 2}
    with phase("copy"):
        now_s[0] += 1
    assert clock.take()["copy"] == 0, "no clock runs"
