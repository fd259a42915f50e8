"""Write the prepared rows of a run as files that other tools read, one for each shard, and a manifest after all of them.

`export.json` is written first and says what is exported: a second command with the same output goes on with the files that are
missing, and one with another run or format is refused. Without `manifest.json` the export is not whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from penstock.digest import bytes_digest
from penstock.errors import DataError, PreflightError, SpecError
from penstock.flows.history.which_run import RunNames
from penstock.flows.servers.probes import storage_failure
from penstock.flows.spec_file import refuse_secrets
from penstock.ingest.columns.arrays import PROVENANCE_COLUMNS
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.manifest import UNIT_RECORD, DatasetManifest, ShardInfo, unit_path
from penstock.ingest.materialize.unit import UnitRecord
from penstock.storage import Storage, root_problem
from penstock.tasks.records.ledger import Ledger, Run

__all__ = ["export_rows"]

BEGUN, MANIFEST = "export.json", "manifest.json"

_AGAIN = "run the pipeline again, which prepares them again; then export"


def export_rows(
    file: Path | None, name: str, output: str, format: str, report: Callable[[str], None] = lambda _line: None
) -> dict[str, Any]:
    """Write the rows of the run called `name`, a shard at a time, in the order in which they are stored.

    Each file has the columns of the prepared rows, `_file` and `_row`: the source file and the row in it, from 0.

    Args:
        output: a folder or a URL.
        format: parquet, arrow (IPC) or csv.

    Raises:
        SpecError: there is no such run; or the output is not a place for files, or holds something else.
        PreflightError: the output cannot be written.
        DataError: the rows are not kept, or damaged; or csv cannot hold a column.
    """
    refuse_secrets("--output", output)
    if problem := root_problem(output):
        raise SpecError(f"--output {output}: {problem}", next_step="correct --output")
    names = RunNames(file)
    run = names.find(name, lambda run: "materialize" in run.keys and bool(run.keys["materialize"].key))
    storage, target = names.ledger.storage, Storage(output)
    manifest = _manifest_of(names.ledger, run)
    what = {"version": 1, "dataset": manifest.key, "content_digest": manifest.content_digest, "format": format}
    if format == "csv":
        _refuse_for_csv(manifest)
    there = _refuse_other(target, what)
    if failure := storage_failure(target):
        held = f"--output {output} cannot be {failure.verb}: {failure.error}"
        raise PreflightError(held, next_step="correct --output, or the credentials and AWS_ENDPOINT_URL")
    target.write_json(BEGUN, what)
    files: list[dict[str, Any]] = []
    for split in dict.fromkeys(manifest.rows):
        for number, shard in enumerate(manifest.shards_of(split)):
            path = f"{split}/{split}-{number:05d}.{format}"
            if path not in there:  # a file is there as a whole or not at all
                _write(storage, shard, target, path, format)
            files.append({"path": path, "split": split, "rows": shard.rows})
            report(f"{path}: {shard.rows:,} rows" + (", there already" if path in there else ""))
    columns = [{"name": info.name, "type": info.type_text} for info in manifest.feed_schema.columns]
    whole = {**what, "run": run.run, "rows": dict(manifest.rows), "columns": columns, "files": files}
    target.write_json(MANIFEST, whole)
    result = {"status": "done", "output": target.root, "manifest": MANIFEST, **whole}
    return {**result, "rows_by_split": whole["rows"], "rows": sum(manifest.rows.values())}


def _manifest_of(ledger: Ledger, run: Run) -> DatasetManifest:
    key = run.keys["materialize"].key
    record = ledger.stage_record(f"stages/materialize/{key}.json", key)
    manifest = DatasetManifest.model_validate(record.output) if record is not None else None
    if manifest is None or not manifest.num_shards:
        cache = run.spec["materialize"]["cache"]
        why = f"materialize.cache: {cache}" if manifest is not None else "they were deleted, or never prepared"
        raise DataError(f"the prepared rows of run {run.run} are not on disk ({why})", next_step="export rows of cache: disk")
    return manifest.opened(ledger.storage)


def _refuse_for_csv(manifest: DatasetManifest) -> None:
    """Raise DataError for a column that csv cannot hold, before anything is written."""
    for info in manifest.feed_schema.columns:
        kind = parse_type(info.arrow) if info.arrow else pa.null()
        is_binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
        if info.shape or info.ragged or info.encoded or is_binary or pa.types.is_nested(kind):
            held = f"column {info.name!r} of type {info.type_text}"
            raise DataError(f"csv cannot hold {held}", next_step="use --format parquet or arrow")


def _refuse_other(target: Storage, what: dict[str, Any]) -> set[str]:
    """Return the files that an export of the same rows has written. Raises SpecError if the output holds something else."""
    target.refuse_file("output")
    there = set(target.tree())
    begun = target.read_json(BEGUN) if BEGUN in there else None
    if there and begun != what:
        held = f"another export (format {begun.get('format')}, dataset {begun.get('dataset')})" if begun else "other files"
        raise SpecError(f"--output {target.root} holds {held}", next_step="name an empty folder, or delete that one")
    return there


def _write(storage: Storage, shard: ShardInfo, target: Storage, path: str, format: str) -> None:
    try:
        content = storage.read_bytes(shard.path)
        unit = storage.read_record(unit_path(shard.unit, UNIT_RECORD), UnitRecord)
    except FileNotFoundError as error:
        raise DataError(f"{storage.uri(shard.path)} is gone", next_step=_AGAIN) from error
    if unit is None or bytes_digest(content) != shard.digest:
        raise DataError(f"{storage.uri(shard.path)} is damaged, or not committed", next_step=_AGAIN)
    table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
    column = table.schema.get_field_index(PROVENANCE_COLUMNS[0])
    of_files = pa.DictionaryArray.from_arrays(table.column(column).combine_chunks().cast(pa.int32()), pa.array(unit.files))
    table = table.set_column(column, PROVENANCE_COLUMNS[0], of_files if format != "csv" else of_files.cast(pa.string()))
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as folder:
        local = Path(folder) / Path(path).name
        if format == "parquet":
            pq.write_table(table, local)
        elif format == "arrow":
            with pa.ipc.new_file(str(local), table.schema) as writer:
                writer.write_table(table)
        else:
            pc.write_csv(table, local)
        target.put_file(local, path)
