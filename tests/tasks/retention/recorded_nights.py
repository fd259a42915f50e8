"""Runs of a nightly pipeline as records, without a server: rows by the real stage, a checkpoint of two small files."""

from __future__ import annotations

import contextlib
import datetime as dt
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.build import damaged_shards, materialize
from penstock.ingest.ray_tasks import local_map
from penstock.progress import silent
from penstock.storage import Storage
from penstock.tasks.records.keys import StageKey
from penstock.tasks.records.ledger import Ledger, Run, StageRecord
from tests.ingest.preparing import ONE_FILE_PER_UNIT, Source

__all__ = ["begin", "night", "nights", "prepare", "source_of", "use_rows"]

BEGAN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def source_of(folder: Path, night: int, window: int | None = None) -> Source:
    """One file more every night; the scaler is fitted again, so that all rows are prepared again.

    Args:
        window: only the files of so many nights.
    """
    first = 0 if window is None else max(0, night - window)
    tables = {i: pa.table({"x": np.arange(4) + 10.0 * i, "y": np.arange(4) % 2}) for i in range(first, night)}
    files = {f"train/{i}.parquet": table for i, table in tables.items()}
    return Source.of(folder, files, [{"standard_scaler": {"columns": ["x"]}}], label="y")


def prepare(source: Source, storage: Storage, key: str) -> DatasetManifest:
    return materialize(
        key=key, preparation=source.preparation(), spec=ONE_FILE_PER_UNIT, storage=storage, progress=silent, parallel=local_map
    )


def begin(ledger: Ledger, name: str, key: str, *, pipeline: str = "p", day: int = 0) -> Run:
    """The records by which a run begins: from here on a cleaning knows what it will use."""
    keys = {stage: StageKey(stage=stage, key=f"{stage}-{key}", inputs={}) for stage in ("read", "materialize", "train")}
    created = (BEGAN + dt.timedelta(days=day)).isoformat()
    run = Run(run=name, pipeline=pipeline, created=created, spec={"name": pipeline}, keys=keys)
    ledger.save_run(run)
    ledger.make_current(run)
    return run


def use_rows(ledger: Ledger, run: Run, source: Source) -> DatasetManifest:
    """What the materialize stage does: believe a whole record, or prepare the rows."""
    key = run.keys["materialize"].key
    path = f"stages/materialize/{key}.json"
    record = ledger.stage_record(path, key)
    if record is not None:
        manifest = DatasetManifest.model_validate(record.output)
        with contextlib.suppress(DataError):  # the table of the shards is gone
            if not damaged_shards(ledger.storage, manifest, deep=True):
                return manifest
    manifest = prepare(source, ledger.storage, key)
    output = manifest.model_dump(mode="json")
    ledger.save_stage(path, StageRecord(stage="materialize", key=key, inputs={}, output=output, seconds=0, made="2026"))
    return manifest


def night(ledger: Ledger, folder: Path, number: int, window: int | None = None) -> DatasetManifest:
    """A run with all that it leaves."""
    run = begin(ledger, f"r{number:02d}", str(number), day=number)
    manifest = use_rows(ledger, run, source_of(folder, number, window))
    ledger.new_attempt(run.run)
    own = ledger.run_storage(run.run)
    for name in ("model.safetensors", "manifest.json"):
        own.write_bytes(f"checkpoints/step-1/{name}", bytes(1000))
    own.write_bytes("answers/test.arrow", bytes(500))
    return manifest


def nights(storage: Storage, folder: Path, count: int) -> list[DatasetManifest]:
    """Nights from the first on."""
    return [night(Ledger(storage), folder, number) for number in range(1, count + 1)]
