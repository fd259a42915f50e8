"""Write the prepared rows of a run as files that other tools read, one for each shard, and a manifest after all of them.

`export.json` is written first, and names the rows and the format: a second command with the same output writes the files that
are missing, each of which appears whole, and one with another run or format is refused. Without `manifest.json` the export
is not whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.digest import bytes_digest
from penstock.errors import DataError, PreflightError, SpecError
from penstock.flows.history.rows import kept_rows
from penstock.flows.history.which_run import RunNames
from penstock.flows.servers.probes import storage_failure
from penstock.flows.spec_file import refuse_secrets
from penstock.ingest.columns.arrays import PROVENANCE_COLUMNS
from penstock.ingest.manifest import UNIT_RECORD, ShardInfo, unit_path
from penstock.ingest.materialize.unit import UnitRecord
from penstock.storage import Storage, root_problem

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
        format: parquet or arrow (IPC).

    Raises:
        SpecError: there is no such run; or the output is not a place for files, or holds something else.
        PreflightError: the output cannot be written.
        DataError: the rows are not kept, or damaged.
    """
    refuse_secrets("--output", output)
    if problem := root_problem(output):
        raise SpecError(f"--output {output}: {problem}", next_step="correct --output")
    names = RunNames(file)
    run = names.find(name, lambda run: "materialize" in run.keys and bool(run.keys["materialize"].key))
    storage, target = names.ledger.storage, Storage(output)
    manifest = kept_rows(names.ledger, run)
    what = {"version": 1, "dataset": manifest.key, "content_digest": manifest.content_digest, "format": format}
    there = _refuse_other(target, what)
    if failure := storage_failure(target):
        held = f"--output {output} cannot be {failure.verb}: {failure.error}"
        raise PreflightError(held, next_step="correct --output, or the credentials and AWS_ENDPOINT_URL")
    target.write_json(BEGUN, what)
    files: list[dict[str, Any]] = []
    for split in dict.fromkeys(manifest.rows):
        for number, shard in enumerate(manifest.shards_of(split)):
            path = f"{split}/{split}-{number:05d}.{format}"
            if path not in there:
                _write(storage, shard, target, path, format)
            files.append({"path": path, "split": split, "rows": shard.rows})
            report(f"{path}: {shard.rows:,} rows" + (", there already" if path in there else ""))
    columns = [{"name": info.name, "type": info.type_text} for info in manifest.feed_schema.columns]
    whole = {**what, "run": run.run, "rows": dict(manifest.rows), "columns": columns, "files": files}
    target.write_json(MANIFEST, whole)
    result = {"status": "done", "output": target.root, "manifest": MANIFEST, **whole}
    return {**result, "rows_by_split": whole["rows"], "rows": sum(manifest.rows.values())}


def _refuse_other(target: Storage, what: dict[str, Any]) -> Collection[str]:
    """Return the files that an earlier export of the same rows has written.

    Raises:
        SpecError: the output holds something else.
    """
    target.refuse_file("output")
    there = target.tree()
    begun = target.read_json(BEGUN) if BEGUN in there else None
    if there and begun != what:
        held = f"another export (format {begun.get('format')}, dataset {begun.get('dataset')})" if begun else "other files"
        raise SpecError(f"--output {target.root} holds {held}", next_step="name an empty folder, or delete that one")
    return there


def _write(storage: Storage, shard: ShardInfo, target: Storage, path: str, format: str) -> None:
    """Write a shard as a file."""
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
    table = table.set_column(column, PROVENANCE_COLUMNS[0], of_files)
    with tempfile.TemporaryDirectory(prefix="penstock-export-") as folder:
        local = Path(folder) / Path(path).name
        if format == "parquet":
            pq.write_table(table, local)
        else:
            with pa.ipc.new_file(str(local), table.schema) as writer:
                writer.write_table(table)
        target.put_file(local, path)
