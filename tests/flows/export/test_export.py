"""Exported rows are those of the run; a killed export is continued, and never taken for a whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from penstock.errors import DataError, PreflightError, SpecError
from penstock.flows.cli import app
from penstock.flows.export import export as exporting
from penstock.flows.export.export import export_rows
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.spec import MaterializeSpec
from penstock.storage import Storage
from penstock.tasks.records.keys import StageKey
from penstock.tasks.records.ledger import Cleaned, Ledger, StageRecord, utc_now
from tests.drills.project import make_project
from tests.ingest.preparing import Source


def finished(folder: Path) -> tuple[Path, Source, Any]:
    """A project with a run on record whose rows are prepared in small shards."""
    columns: dict[str, Any] = {"x": list(range(40)), "y": [n % 2 for n in range(40)]}
    columns["v"] = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(80, dtype=np.float32).reshape(40, 2))
    table = pa.table(columns)
    files = {"train/a.parquet": table.slice(0, 25), "train/b.parquet": table.slice(25)}
    source = Source.of(folder / "data", files, [], label="y", validation={"fraction": 0.3})
    file = make_project(folder / "p", files=1)
    storage = Storage(str(file.parent / ".penstock"))
    manifest = source.materialize(storage, MaterializeSpec(unit_bytes=1, shard_bytes=200))
    ledger = Ledger(storage)
    key = StageKey(stage="materialize", key=manifest.key, inputs={})
    run = ledger.new_run("drill", {"materialize": {"cache": "disk"}})
    run = run.model_copy(update={"status": "done", "keys": {"materialize": key}})
    ledger.save_run(run)
    output = manifest.model_dump(mode="json")
    made = {"seconds": 1.0, "made": utc_now(), "run": run.run}
    record = StageRecord(stage="materialize", key=manifest.key, inputs={}, output=output, **made)
    ledger.save_stage(f"stages/materialize/{manifest.key}.json", record)
    return file, source, manifest.opened(storage)


def read(path: Path) -> pa.Table:
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(str(path)).read_all()


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_export_has_rows_in_stored_order_with_source(tmp_path: Path, format: str) -> None:
    file, _, manifest = finished(tmp_path)
    arguments = ["export", "last", "--file", str(file), "--format", format, "--output", str(tmp_path / "out")]
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0, ran.output
    whole = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert whole["rows"] == dict(manifest.rows) and ": 40 rows in" in ran.output
    storage = Storage(str(file.parent / ".penstock"))
    for split in ("train", "validation"):
        table = pa.concat_tables([read(tmp_path / "out" / each["path"]) for each in whole["files"] if each["split"] == split])
        stored = [open_shard(storage.local_path(shard.path)) for shard in manifest.shards_of(split)]
        assert len(stored) > 1 and table.num_rows == manifest.rows[split]
        for name in ("x", "y"):
            assert table.column(name).to_pylist() == np.concatenate([shard.column(name) for shard in stored]).tolist()
        first = {"a.parquet": 0, "b.parquet": 25}
        places = zip(table.column("_file").to_pylist(), table.column("_row").to_pylist(), strict=True)
        assert [first[name] + row for name, row in places] == table.column("x").to_pylist()
        vectors = table.column("v").combine_chunks().storage.flatten().to_numpy().reshape(-1, 2)
        assert vectors[:, 0].tolist() == [2.0 * x for x in table.column("x").to_pylist()]


def test_killed_export_is_not_whole_and_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _, manifest = finished(tmp_path)
    out, writes, write = tmp_path / "out", [], exporting._write

    def dies_at_third(*arguments: Any) -> None:
        writes.append(arguments[3])
        if len(writes) == 3:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(exporting, "_write", dies_at_third)
    with pytest.raises(KeyboardInterrupt):
        export_rows(file, "last", str(out), "parquet")
    assert not (out / "manifest.json").exists() and len(list(out.rglob("*.parquet"))) == 2
    with pytest.raises(SpecError, match=r"holds another export \(format parquet"):
        export_rows(file, "last", str(out), "arrow")
    result = export_rows(file, "last", str(out), "parquet")
    assert (
        len(writes) == 3 + manifest.num_shards - 2
        and sum(pq.read_metadata(each).num_rows for each in out.rglob("*.parquet")) == 40
    )
    assert (out / "manifest.json").exists() and result["rows"] == 40
    gone, written = out / writes[1], len(writes)
    gone.unlink()
    export_rows(file, "last", str(out), "parquet")
    assert [out / path for path in writes[written:]] == [gone]


def test_export_names_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    file, _, _ = finished(tmp_path)
    with pytest.raises(SpecError, match=r"--output nope://x: there is no store 'nope'"):
        export_rows(file, "last", "nope://x", "parquet")
    with pytest.raises(SpecError, match="looks like a secret") as refused:
        export_rows(file, "last", "s3://me:mypassword@bucket/x", "parquet")
    assert "mypassword" not in str(refused.value)
    with pytest.raises(PreflightError, match="--output /proc/x cannot be written"):
        export_rows(file, "last", "/proc/x", "parquet")


def test_export_refuses_other_files_and_damaged_rows(tmp_path: Path) -> None:
    file, _, manifest = finished(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(SpecError, match="holds other files"):
        export_rows(file, "last", str(tmp_path / "mine"), "parquet")
    shard = Storage(str(file.parent / ".penstock")).local_path(manifest.shards_of("train")[0].path)
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-8] + bytes(8))
    with pytest.raises(DataError, match="is damaged, or not committed"):
        export_rows(file, "last", str(tmp_path / "out"), "parquet")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_export_names_rows_that_are_not_kept(tmp_path: Path) -> None:
    file, _, manifest = finished(tmp_path)
    ledger, path = Ledger(Storage(str(file.parent / ".penstock"))), f"stages/materialize/{manifest.key}.json"
    record = ledger.stage_record(path, manifest.key)
    assert record is not None
    ledger.save_stage(path, record.model_copy(update={"cleaned": Cleaned(at=utc_now(), by="penstock clean on host")}))
    with pytest.raises(DataError, match=r"the rows of run \S+ were cleaned on \S+ by penstock clean on host"):
        export_rows(file, "last", str(tmp_path / "out"), "parquet")
