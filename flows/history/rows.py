"""Find the rows that a step of a run trained on, with file, line and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from penstock.errors import DataError, PenstockError, SpecError
from penstock.flows.history.which_run import RunNames
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.formats.registry import reader_of
from penstock.ingest.formats.section import spec_class_for
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.provenance import Sources, sources_of
from penstock.ingest.read.snapshot import SourceSnapshot, iterate_rows
from penstock.ingest.shuffle.order import Order
from penstock.ingest.spec import DataSpec
from penstock.messages import counted, shorten
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger, Run
from penstock.tasks.stages import StageName
from penstock.training.frameworks.registry import FRAMEWORKS
from penstock.training.spec import TrainSpec

__all__ = ["kept_rows", "rows_of_step", "show_rows"]


def rows_of_step(file: Path | None, name: str, step: int) -> dict[str, Any]:
    """Return what `penstock rows --json` prints: the rows of a step, from 1, in their order in the global batch.

    Raises:
        SpecError: there is no such run or step.
        DataError: the rows of the run are not kept.
    """
    names = RunNames(file)
    run = names.find(name, lambda run: "shuffle" in run.keys and bool(run.keys["shuffle"].key))
    order = Order.model_validate(_stage_output(names.ledger, run, "shuffle")["order"])
    train = TrainSpec.model_validate(run.spec["train"])
    framework = FRAMEWORKS.get(train.framework)
    if a_step := getattr(framework, "a_step", ""):
        raise SpecError(
            f"the rows of a step of run {run.run} are not known: with train.framework: {train.framework} a step is {a_step}",
            next_step=f"penstock report {run.run} shows the rows of the whole run",
        )
    manifest = kept_rows(names.ledger, run)
    ids, epoch = _step_row_ids(names.ledger.storage, manifest, order, train, step)
    ascending = np.argsort(ids, kind="stable")
    try:
        found = sources_of(names.ledger.storage, manifest, "train", ids[ascending])
    except FileNotFoundError as error:
        raise DataError(f"the shards of run {run.run} are gone: {error}", next_step="run the pipeline again") from error
    rows = _describe_rows(run, _stage_output(names.ledger, run, "read"), found, ids[ascending])
    by_position = [rows[at] for at in np.argsort(ascending, kind="stable").tolist()]
    return {"status": "done", "run": run.run, "step": step, "epoch": epoch + 1, "num_rows": len(ids), "rows": by_position}


def kept_rows(ledger: Ledger, run: Run) -> DatasetManifest:
    """Return the manifest of a run's prepared rows.

    Raises:
        DataError: they are not kept.
    """
    manifest = DatasetManifest.model_validate(_stage_output(ledger, run, "materialize"))
    if not manifest.num_shards:
        cache = run.spec["materialize"]["cache"]
        raise DataError(
            f"the rows of run {run.run} are not kept (materialize.cache: {cache})", next_step="rows are found with cache: disk"
        )
    return manifest.opened(ledger.storage)


def show_rows(result: dict[str, Any], console: Console) -> None:
    """Print a line for each row."""
    console.print(
        f"{result['run']}: step {result['step']:,} of epoch {result['epoch']:,}, {counted(result['num_rows'], 'row')}"
    )
    for row in result["rows"]:
        place = f"{row['file']}:{row['line']}" if row["line"] is not None else f"{row['file']}, row {row['row']:,}"
        values = row["values"] if row["values"] is not None else {"": row["not_read"]}
        text = ", ".join(f"{name}={shorten(value)}" if name else str(value) for name, value in values.items())
        console.print(f"  {place}  {text}")


def _stage_output(ledger: Ledger, run: Run, stage: StageName) -> dict[str, Any]:
    key = run.keys[stage].key if stage in run.keys else ""
    record = ledger.stage_record(f"stages/{stage}/{key}.json", key, cleaned=True) if key else None
    gone = record.cleaned if record is not None else run.cleaned
    if gone is not None:
        raise DataError(
            f"the rows of run {run.run} were {gone}",
            next_step="run the pipeline with those files and settings again: it prepares them again (docs/retention.md)",
        )
    if record is None:
        raise DataError(f"run {run.run} has no {stage} on record", next_step="penstock log lists the runs that went further")
    return record.output


def _step_row_ids(
    storage: Storage, manifest: DatasetManifest, order: Order, train: TrainSpec, step: int
) -> tuple[NDArray[np.int64], int]:
    """Return the row ids of an optimizer step, which is one global batch, and its epoch from 0."""
    feed = open_cached_feed([(storage, manifest)], "train", batch_rows=train.batch_rows, order=order, last=train.last_batch)
    if step < 1 or (train.max_steps is not None and step > train.max_steps):
        raise _no_such_step(step, train.max_steps)
    equal = order.by_length is None or order.by_length.batch_entries is None
    per_epoch = -(-feed.num_rows // train.batch_rows)
    if equal and step > per_epoch * train.epochs:
        raise _no_such_step(step, per_epoch * train.epochs)
    epoch, before = divmod(step - 1, per_epoch) if equal else (0, step - 1)
    while epoch < train.epochs:
        batches = feed.batches(epoch, before * train.batch_rows if equal else 0)
        for number, batch in enumerate(batches):
            if equal or number == before:
                return batch.row_ids, epoch
        before -= number + 1
        epoch += 1
    raise _no_such_step(step, None)


def _no_such_step(step: int, last: int | None) -> SpecError:
    return SpecError(
        f"there is no step {step}: " + ("the first is 1" if last is None else f"the run has 1 to {last:,}"),
        next_step="give another --step",
    )


def _describe_rows(run: Run, read: dict[str, Any], found: Sources, ids: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Return file, row, line and source values of each row, in the order of `found`."""
    snapshot, data = SourceSnapshot.model_validate(read), spec_class_for(run.spec["data"]).model_validate(run.spec["data"])
    rows: list[dict[str, Any]] = [{} for _ in ids]
    for index, name in enumerate(found.names):
        at = np.flatnonzero(found.files == index)
        wanted = dict(zip(found.rows[at].tolist(), at.tolist(), strict=True))
        values, lines, trouble = _source_values(data, snapshot, name, wanted)
        for row, place in zip(found.rows[at].tolist(), at.tolist(), strict=True):  # flat_map makes several of one
            described = {"id": int(ids[place]), "file": f"train/{name}", "row": row, "line": lines.get(row)}
            rows[place] = {**described, "values": values.get(row), "not_read": trouble}
    return rows


def _source_values(
    data: DataSpec, snapshot: SourceSnapshot, name: str, rows: dict[int, int]
) -> tuple[dict[int, dict[str, Any]], dict[int, int], str | None]:
    """Return row -> values, row -> line, and the reason if the file is gone or has changed."""
    files = [file for file in snapshot.files if file.location == "train" and file.name == name]
    values: dict[int, dict[str, Any]] = {}
    try:
        for batch in iterate_rows(data, snapshot, files):
            stop = batch.first_row + batch.table.num_rows
            for row in rows:
                if batch.first_row <= row < stop:
                    values[row] = batch.table.slice(row - batch.first_row, 1).to_pylist()[0]
            if len(values) == len(rows):
                break
        return values, reader_of(data, snapshot.format).lines(files[0], rows), None
    except PenstockError as error:
        return {}, {}, f"its values cannot be read: {error.message}"
