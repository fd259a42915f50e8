"""Tables with versions and queries: what was read is kept, known by its version, and read again only when that changes."""

from __future__ import annotations

import base64
import datetime
import json
import shutil
import sqlite3
import struct
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataError, PenstockError, PreflightError
from penstock.ingest.formats.arrow_files import keep_object
from penstock.ingest.formats.registry import format_of
from penstock.ingest.formats.section import spec_class_for
from penstock.ingest.formats.sources.tables import object_store_options
from penstock.ingest.read.row_hash import hash_columns
from penstock.ingest.read.snapshot import SourceSnapshot, iterate_rows, read_source
from penstock.progress import silent
from penstock.storage import Storage
from penstock.stores import StoreSpec, use_stores
from penstock.tasks.prepare import READ as STAGE
from tests.ingest.reading import read_rows, write_files

FIRST = pa.table({"x": [1, 2, 3], "kind": ["a", "b", "a"]})
SECOND = pa.table({"x": [4, 5], "kind": ["b", "c"]})


def read(folder: Path, format: str, train: str, **options: Any) -> tuple[SourceSnapshot, list[dict[str, Any]]]:
    section = {"format": format, "train": train, format: options}
    data = spec_class_for(section).model_validate(section)
    files = format_of(data).listing(data, folder, Storage(str(folder / "storage"))).files
    snapshot = read_source(data, files, silent)
    rows = [row for batch in iterate_rows(data, snapshot, snapshot.files) for row in batch.table.to_pylist()]
    return snapshot, sorted(rows, key=lambda row: row["x"])


class Table(NamedTuple):
    """A table that a library has written, with two versions."""

    train: str
    options: dict[str, Any]
    remove: Callable[[], None]
    old: dict[str, Any]


def delta(folder: Path) -> Table:
    deltalake = pytest.importorskip("deltalake")
    uri = str(folder / "table")
    deltalake.write_deltalake(uri, FIRST, partition_by=["kind"])
    deltalake.write_deltalake(uri, SECOND, mode="append")
    return Table("table", {}, lambda: deltalake.DeltaTable(uri).delete("x = 2"), {"version": 0})


def lance(folder: Path) -> Table:
    lance = pytest.importorskip("lance")
    uri = str(folder / "table")
    lance.write_dataset(FIRST, uri)
    lance.write_dataset(SECOND, uri, mode="append")
    return Table("table", {}, lambda: lance.dataset(uri).delete("x = 2"), {"version": 1})


def new_iceberg(folder: Path, rows: pa.Table) -> tuple[Any, dict[str, Any]]:
    """A table of Iceberg, `db.rows`, that holds the rows, and the options that name its catalog."""
    pytest.importorskip("pyiceberg.catalog.sql")
    from pyiceberg.catalog import load_catalog

    (folder / "warehouse").mkdir()
    properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    catalog = load_catalog("tests", **properties)
    catalog.create_namespace("db")
    table = catalog.create_table("db.rows", rows.schema)
    table.append(rows)
    return table, {"catalog": "tests", "properties": properties}


def iceberg(folder: Path) -> Table:
    table, options = new_iceberg(folder, FIRST)
    old = table.current_snapshot().snapshot_id
    table.append(SECOND)
    return Table("db.rows", options, lambda: table.delete("x == 2"), {**options, "snapshot": old})


def test_the_files_of_an_iceberg_table_hold_its_partitions_columns_and_are_read_as_they_lie(tmp_path: Path) -> None:
    table, options = new_iceberg(tmp_path, FIRST)
    with table.update_spec() as spec:
        spec.add_identity("kind")
    table.append(SECOND)
    snapshot, rows = read(tmp_path, "iceberg", "db.rows", **options)
    assert rows == [*FIRST.to_pylist(), *SECOND.to_pylist()]
    assert any("/kind=" in file.name for file in snapshot.files) and not list((tmp_path / "storage").rglob("*.arrow"))


@pytest.mark.parametrize("made", [delta, lance, iceberg], ids=["delta", "lance", "iceberg"])
def test_a_table_is_read_at_one_version_that_is_in_the_key_and_shown(tmp_path: Path, made: Callable[[Path], Table]) -> None:
    format = made.__name__
    table = made(tmp_path)
    snapshot, rows = read(tmp_path, format, table.train, **table.options)
    assert rows == [*FIRST.to_pylist(), *SECOND.to_pylist()]
    (version,) = {file.state for file in snapshot.files}
    copies = list((tmp_path / "storage").rglob("*.arrow"))
    assert bool(copies) is (format == "lance"), "Parquet files are read as they lie"
    assert STAGE.facts(snapshot.model_dump(mode="json"))[0] == (format, version.replace("-", " "))
    again, _ = read(tmp_path, format, table.train, **table.options)
    assert again.digest == snapshot.digest and [file.uri for file in again.files] == [file.uri for file in snapshot.files]
    table.remove()
    newer, rows = read(tmp_path, format, table.train, **table.options)
    assert [row["x"] for row in rows] == [1, 3, 4, 5], "a deleted row is gone"
    assert newer.digest != snapshot.digest and newer.files[0].state != version
    assert read(tmp_path, format, table.train, **table.old)[1] == FIRST.to_pylist()
    for wrong in ("nowhere", "no.where"):
        with pytest.raises(DataError, match=wrong):
            read(tmp_path, format, wrong, **table.options)
    if format != "iceberg":
        with pytest.raises(DataError, match=r"is a (Delta|Lance) table") as refused:
            read_rows(tmp_path, "parquet", train="table")
        assert refused.value.next_step == f"data.format: {format}"


class Copied(NamedTuple):
    """A table of `ROWS` whose rows are copied, not read as they lie.

    Attributes:
        left: x of the rows that are not deleted.
    """

    section: dict[str, Any]
    left: set[int]


ROWS = pa.table({"x": range(1000), "kind": ["a", "b"] * 500})


def copied_lance(folder: Path) -> Copied:
    library = pytest.importorskip("lance")
    uri = str(folder / "table")
    library.write_dataset(ROWS, uri, max_rows_per_file=300)
    library.dataset(uri).delete("x < 400 or x % 7 = 3")
    left = {x for x in range(400, 1000) if x % 7 != 3}
    return Copied({"format": "lance", "train": uri}, left)


def copied_delta(folder: Path) -> Copied:
    """Times in folders' names read differently elsewhere."""
    deltalake = pytest.importorskip("deltalake")
    times = pa.array([row // 250 for row in range(1000)], pa.timestamp("us", tz="UTC"))
    deltalake.write_deltalake(str(folder / "table"), ROWS.append_column("at", times), partition_by=["at"])
    return Copied({"format": "delta", "train": "table"}, set(range(1000)))


def copied_iceberg(folder: Path) -> Copied:
    """A file of positions deletes all rows of one file and two rows of the others."""
    table, options = new_iceberg(folder, ROWS.slice(0, 300))
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    table.append(ROWS.slice(300, 300))
    table.append(ROWS.slice(600))
    names = table.inspect.files()["file_path"].to_pylist()
    held = {name: pq.read_table(name.removeprefix("file://"))["x"].to_pylist() for name in names}
    gone = [(name, row) for name in names for row in (range(len(held[name])) if name == names[0] else (0, 7))]
    by_id = [{"PARQUET:field_id": number} for number in ("2147483546", "2147483545")]  # as the specification says
    fields = [pa.field("file_path", pa.string(), False, by_id[0]), pa.field("pos", pa.int64(), False, by_id[1])]
    path = folder / "warehouse" / "deletes.parquet"
    pq.write_table(pa.table([*map(pa.array, zip(*gone, strict=True))], schema=pa.schema(fields)), path)
    deletes = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=f"file://{path}",
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(gone),
        file_size_in_bytes=path.stat().st_size,
        column_sizes={},
        value_counts={},
        null_value_counts={},
        nan_value_counts={},
        lower_bounds={},
        upper_bounds={},
    )
    deletes.spec_id = 0
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as added:
        added.append_data_file(deletes)
    left = set(range(1000)) - {held[name][row] for name, row in gone}
    return Copied({"format": "iceberg", "train": "db.rows", "iceberg": options}, left)


@pytest.mark.parametrize("made", [copied_delta, copied_lance, copied_iceberg], ids=["delta", "lance", "iceberg"])
def test_copy_of_a_table_holds_the_rows_that_are_left(tmp_path: Path, made: Callable[[Path], Copied]) -> None:
    table = made(tmp_path)
    data = spec_class_for(table.section).model_validate(table.section)
    files = format_of(data).listing(data, tmp_path, Storage(str(tmp_path / "storage"))).files
    assert [file.name.split("/")[1] for file in files] == ["part-00000.arrow"]
    snapshot = read_source(data, files, silent)
    rows = pa.concat_tables([batch.table for batch in iterate_rows(data, snapshot, snapshot.files)])
    assert len(rows) == len(table.left) and set(rows["x"].to_pylist()) == table.left


def database(folder: Path) -> Path:
    file = folder / "rows.db"
    with sqlite3.connect(file) as connection:
        connection.execute("create table rows (x integer, y real, name text, picture blob)")
        connection.executemany("insert into rows values (?, ?, ?, ?)", [(2, 0.5, "b", b"\xff"), (1, None, "a", b"")])
    connection.close()
    return file


def test_a_querys_answer_is_kept_until_query_snapshot_or_database_change(tmp_path: Path) -> None:
    file = database(tmp_path)
    query, options = "select x, y, name, picture from rows order by x", {"connection": "sqlite:///rows.db"}
    first, rows = read(tmp_path, "sql", query, **options)
    assert rows == [{"x": 1, "y": None, "name": "a", "picture": b""}, {"x": 2, "y": 0.5, "name": "b", "picture": b"\xff"}]
    write_files(tmp_path, {"rows.sql": query})
    assert read(tmp_path, "sql", "rows.sql", **options)[0].files == first.files, "the same query in a file"
    with sqlite3.connect(file) as connection:
        connection.execute("insert into rows values (3, 1.5, 'c', null)")
    connection.close()
    assert [row["x"] for row in read(tmp_path, "sql", query, **options)[1]] == [1, 2, 3]
    dated, _ = read(tmp_path, "sql", query, snapshot="2026-11-24", **options)
    assert {file.name for file in dated.files} == {"snapshot-2026-11-24/part-00000.arrow"}


def test_rows_committed_to_sqlites_wal_are_read(tmp_path: Path) -> None:
    query, options = "select x from rows order by x", {"connection": "sqlite:///rows.db"}
    open_elsewhere = sqlite3.connect(database(tmp_path))
    open_elsewhere.execute("pragma journal_mode=wal")
    assert [row["x"] for row in read(tmp_path, "sql", query, **options)[1]] == [1, 2]
    with open_elsewhere:
        open_elsewhere.execute("update rows set x = 10 where x = 1")
    assert [row["x"] for row in read(tmp_path, "sql", query, **options)[1]] == [2, 10]
    with open_elsewhere:
        open_elsewhere.execute("update rows set x = 11 where x = 10")
    assert [row["x"] for row in read(tmp_path, "sql", query, **options)[1]] == [2, 11]
    open_elsewhere.close()


def test_what_is_wrong_with_a_query_is_named_without_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database(tmp_path)
    options = {"connection": "sqlite:///rows.db"}
    for query, said in {
        "select absent from rows": "(?s)no such column: absent.*in data, or --format and --option of predict",
        "select x, y as x from rows": "gives column 'x' twice",
        "select x from rows where x > 9": "holds no rows",
        "select case when x = 1 then 1 else 'a' end as x from rows": "does not become Arrow",
    }.items():
        with pytest.raises(DataError, match=said):
            read(tmp_path, "sql", query, **options)
    with pytest.raises(DataError, match="there is no query"):
        read(tmp_path, "sql", "nowhere.sql", **options)
    with pytest.raises(DataError, match="there is no database"):
        read(tmp_path, "sql", "select 1", connection="sqlite:///nowhere.db")
    with pytest.raises(PreflightError, match="WAREHOUSE_URL is not set"):
        read(tmp_path, "sql", "select 1", connection="$WAREHOUSE_URL")
    monkeypatch.setenv("WAREHOUSE_URL", "postgresql+psycopg://me:hunter2hunter2@127.0.0.1:9/db")
    with pytest.raises(PenstockError) as refused:
        read(tmp_path, "sql", "select 1", connection="$WAREHOUSE_URL")
    assert "hunter2" not in str(refused.value)


def test_types_of_a_database_are_kept(tmp_path: Path) -> None:
    rows = {"x": [Decimal("1.50"), None], "at": [datetime.datetime(2020, 1, 2), None], "ok": [True, False]}
    uri = keep_object(rows, Storage(str(tmp_path)), "rows")
    table = read_rows(Path(uri), "arrow")
    assert table.schema.types == [pa.decimal128(3, 2), pa.timestamp("us"), pa.bool_()]


def test_a_delta_table_is_read_from_a_store_of_its_own(tmp_path: Path, rows_bucket: tuple[str, dict[str, str]]) -> None:
    deltalake = pytest.importorskip("deltalake")
    bucket, settings = rows_bucket
    use_stores({bucket: StoreSpec.model_validate(settings)})
    deltalake.write_deltalake(f"{bucket}/table", FIRST, storage_options=object_store_options(bucket))
    assert read(tmp_path, "delta", f"{bucket}/table")[1] == FIRST.to_pylist()


Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"

EVERY = pa.table(
    {
        "x": pa.array(range(40), pa.int64()),
        "kind": ["a", "b/ =c", None, "ü"] * 10,
        "day": [datetime.date(2026, 11, 20 + row % 3) for row in range(40)],
        "at": pa.array(range(40), pa.timestamp("us", tz="UTC")),
        "n": pa.array([row % 2 for row in range(40)], pa.int32()),
        "values": [[row / 2] * 3 for row in range(40)],
    }
)


def delta_in_folders(folder: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(folder / "table"), EVERY, partition_by=["kind", "day", "n"])


def delta_by_time(folder: Path) -> None:
    """Times in folders' names read differently elsewhere."""
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(folder / "table"), EVERY.slice(0, 4), partition_by=["at"])
    deltalake.write_deltalake(str(folder / "table"), EVERY.slice(4), mode="append")


def delta_grown(folder: Path) -> None:
    """The first files lack a column."""
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(folder / "table"), EVERY.slice(0, 4).drop_columns(["values"]))
    deltalake.write_deltalake(str(folder / "table"), EVERY.slice(4), mode="append", schema_mode="merge")


@pytest.mark.parametrize(
    ("made", "are_files"),
    [(delta_in_folders, True), (delta_by_time, False), (delta_grown, False)],
    ids=lambda made: str(made)[:24],
)
def test_files_of_a_table_give_the_rows_and_splits_that_a_copy_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[Path], None], are_files: bool
) -> None:
    made(tmp_path)
    there, rows = read(tmp_path, "delta", "table")
    assert bool(list((tmp_path / "storage").rglob("*.arrow"))) is not are_files
    assert [row["x"] for row in rows] == EVERY["x"].to_pylist() and {type(row["day"]) for row in rows} == {datetime.date}
    monkeypatch.setattr("penstock.ingest.formats.sources.delta.plain_files", lambda *_: None)
    shutil.rmtree(tmp_path / "storage")
    copied, same = read(tmp_path, "delta", "table")
    assert list((tmp_path / "storage").rglob("*.arrow")) and rows == same
    types = [{column.name: column.type for column in each.columns} for each in (there, copied)]
    assert types[0] == types[1]
    tables = [pa.Table.from_pylist(same, snapshot.arrow_schema()) for snapshot in (there, copied)]
    hashes = [hash_columns(table, table.column_names) for table in tables]
    assert np.array_equal(hashes[0], hashes[1]), "what decides on the split of a row"


def rewrite_log(table: Path, change: Callable[[dict[str, Any]], None], protocol: dict[str, Any]) -> None:
    """Make of a table of one version one of another protocol."""
    (log,) = (table / "_delta_log").glob("*.json")
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in entries:
        change(entry)
        if "protocol" in entry:
            entry["protocol"] = protocol
    log.write_text("\n".join(map(json.dumps, entries)) + "\n")


def test_renamed_columns_of_a_delta_table_are_not_read_as_nulls(tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    deltalake.write_deltalake(str(tmp_path / "table"), EVERY, partition_by=["n"])

    def rename(entry: dict[str, Any]) -> None:
        if "metaData" in entry:
            schema = json.loads(entry["metaData"]["schemaString"])
            for number, field in enumerate(schema["fields"], 1):
                names = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
                field |= {"metadata": names, "name": f"new_{field['name']}" if field["name"] != "x" else "x"}
            partitions = [f"new_{name}" for name in entry["metaData"]["partitionColumns"]]
            configuration = {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "9"}
            entry["metaData"] |= {
                "schemaString": json.dumps(schema),
                "configuration": configuration,
                "partitionColumns": partitions,
            }

    rewrite_log(tmp_path / "table", rename, {"minReaderVersion": 2, "minWriterVersion": 5})
    rows = read(tmp_path, "delta", "table")[1]
    renamed = EVERY.rename_columns([f"new_{name}" if name != "x" else "x" for name in EVERY.column_names])
    assert rows == renamed.to_pylist()


def test_rows_that_deletion_vectors_take_from_a_delta_table_are_gone(tmp_path: Path) -> None:
    deltalake, bitmaps = pytest.importorskip("deltalake"), pytest.importorskip("pyroaring")
    deltalake.write_deltalake(str(tmp_path / "table"), EVERY)
    # As the protocol says: a magic number, one bitmap of 32 bits with its key, and all of it in base 85 by ZeroMQ's alphabet.
    vector = struct.pack("<IQI", 1681511377, 1, 0) + bitmaps.BitMap([2, 39]).serialize()
    vector += bytes(-len(vector) % 4)
    written = base64.b85encode(vector).decode().translate(str.maketrans(B85, Z85))

    def delete(entry: dict[str, Any]) -> None:
        if "add" in entry:
            deleted = {"storageType": "i", "pathOrInlineDv": written, "sizeInBytes": len(vector), "cardinality": 2}
            entry["add"]["deletionVector"] = deleted

    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    rewrite_log(tmp_path / "table", delete, {"minReaderVersion": 3, "minWriterVersion": 7, **features})
    rows = read(tmp_path, "delta", "table")[1]
    assert rows == [row for row in EVERY.to_pylist() if row["x"] not in (2, 39)]


def test_files_on_this_machine_are_copied_to_a_storage_that_others_read(tmp_path: Path) -> None:
    delta(tmp_path)
    section = {"format": "delta", "train": "table"}
    data = spec_class_for(section).model_validate(section)
    files = format_of(data).listing(data, tmp_path, Storage(f"memory://copied{tmp_path}")).files
    assert [file.uri.startswith("memory://") for file in files] == [True] and files[0].state == "version-1"


def test_iceberg_fields_dropped_and_added_anew_are_null(tmp_path: Path) -> None:
    nested = pa.table({"x": [1], "kind": ["a"], "s": [{"w": 1, "v": "old"}], "l": [[{"h": 1, "g": "old"}]]})
    table, options = new_iceberg(tmp_path, nested)
    from pyiceberg.types import StringType

    for name in ("s.v", "l.element.g"):
        with table.update_schema() as update:
            update.delete_column(name)
        with table.update_schema() as update:
            update.add_column(tuple(name.split(".")), StringType())
    (row,) = read(tmp_path, "iceberg", "db.rows", **options)[1]
    assert row == {"x": 1, "kind": "a", "s": {"w": 1, "v": None}, "l": [{"h": 1, "g": None}]}
    assert list((tmp_path / "storage").rglob("*.arrow"))


def test_a_file_that_a_clean_up_took_away_is_named(tmp_path: Path) -> None:
    delta(tmp_path)
    read(tmp_path, "delta", "table")
    next((tmp_path / "table").rglob("*.parquet")).unlink()
    with pytest.raises(DataError, match="is gone, and the table's log names it") as refused:
        read(tmp_path, "delta", "table")
    assert "newer version" in str(refused.value.next_step)
