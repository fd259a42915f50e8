"""A source on S3 reads as on disk, and its failures name endpoint, bucket, key and the setting to look at."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pyarrow as pa
import pytest

from penstock.errors import DataError, ServiceError
from penstock.ingest.read.snapshot import read_source
from penstock.ingest.spec import DataSpec
from penstock.progress import silent
from tests.ingest.reading import listed, read_rows, read_snapshot, write_files

pytestmark = pytest.mark.s3


@pytest.fixture
def source(s3_bucket: str, tmp_path: Path) -> str:
    """A prefix with two CSV files, one of them with a name that needs care, a Parquet file and clutter."""
    local = write_files(
        tmp_path / "local",
        {
            "csv/a.csv": "id,x\n1,a\n",
            "csv/b c+d=1%20ü.csv": "id,x\n2,b\n",
            "csv/_SUCCESS": "",
            "table/t.parquet": pa.table({"id": [1, 2, 3]}),
        },
    )
    fsspec.filesystem("s3").put(f"{local}/", f"{s3_bucket}/data/", recursive=True)
    return f"{s3_bucket}/data"


def test_rows_are_those_of_the_objects(source: str, tmp_path: Path) -> None:
    assert read_rows(tmp_path, "csv", train=f"{source}/csv/").to_pydict() == {"id": [1, 2], "x": ["a", "b"]}
    assert read_rows(tmp_path, "parquet", train=f"{source}/table").num_rows == 3
    assert read_rows(tmp_path, "csv", train=f"{source}/*/a.csv").num_rows == 1


def test_the_fingerprint_is_the_etag(source: str, tmp_path: Path) -> None:
    _, before = read_snapshot(tmp_path, "csv", train=f"{source}/csv/a.csv")
    fsspec.filesystem("s3").pipe(f"{source}/csv/a.csv", b"id,x\n9,a\n")
    _, after = read_snapshot(tmp_path, "csv", train=f"{source}/csv/a.csv")
    assert before.files[0].fingerprint != after.files[0].fingerprint
    assert before.digest != after.digest


@pytest.mark.parametrize("is_bucket", [True, False])
def test_a_missing_key_or_bucket_names_the_settings(source: str, tmp_path: Path, is_bucket: bool) -> None:
    train = "s3://no-such-bucket/data/" if is_bucket else f"{source}/nowhere/"
    with pytest.raises(DataError, match="matches no file, or its bucket or server is not there") as refused:
        read_snapshot(tmp_path, "csv", train=train)
    assert "correct data.train, or AWS_ENDPOINT_URL" in refused.value.next_step and train in refused.value.message


def test_wrong_credentials_name_the_setting(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from s3fs import S3FileSystem

    data = DataSpec(format="csv", train=f"{source}/csv/")
    files = listed(data, tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    S3FileSystem.clear_instance_cache()
    bucket = source.split("/")[2]
    for act in (lambda: listed(data, tmp_path), lambda: read_source(data, files, silent)):
        with pytest.raises(ServiceError, match=f"refuses the credentials for bucket '{bucket}'") as caught:
            act()
        assert "AWS_SECRET_ACCESS_KEY" in caught.value.next_step
    S3FileSystem.clear_instance_cache()


def test_an_object_that_went_away_is_named(source: str, tmp_path: Path) -> None:
    data = DataSpec(format="csv", train=f"{source}/csv/")
    files = listed(data, tmp_path)
    fsspec.filesystem("s3").rm(f"{source}/csv/a.csv")
    with pytest.raises(DataError, match=r"csv/a\.csv: gone since it was listed"):
        read_source(data, files, silent)


@pytest.mark.drill
def test_empty_object_beside_its_folder_is_no_file(source: str, tmp_path: Path) -> None:
    store = fsspec.filesystem("s3")
    for mark in ("csv", "marks_$folder$", "csv/"):
        store.pipe_file(f"{source}/{mark}", b"")
    for train in (f"{source}/csv/", f"{source}/csv", f"{source}/csv/*.csv"):
        assert read_rows(tmp_path, "csv", train=train)["id"].to_pylist() == [1, 2]
    store.rm(f"{source}/table/t.parquet")
    assert read_rows(tmp_path, "csv", train=source)["id"].to_pylist() == [1, 2]


def test_key_with_nameless_folder_is_named(source: str, tmp_path: Path) -> None:
    fsspec.filesystem("s3").pipe_file(f"{source}/csv//c.csv", b"id,x\n3,c\n")
    with pytest.raises(DataError, match=r"csv//c\.csv: its key has a folder without a name") as refused:
        read_rows(tmp_path, "csv", train=f"{source}/csv/")
    assert "copy the object to a key without //" in refused.value.next_step
