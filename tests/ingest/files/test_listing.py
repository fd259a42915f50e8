"""Listing takes the files a user means, leaves clutter out, and says what is wrong with a location."""

from __future__ import annotations

import datetime as dt
import functools
import gzip
import hashlib
import http.server
import threading
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from penstock.errors import DataError, ServiceError, SpecError
from penstock.ingest.files.listing import list_source
from penstock.ingest.files.unchanged import unchanged
from penstock.ingest.formats.registry import format_of
from penstock.ingest.spec import DataSpec
from tests.ingest.reading import listed, read_rows, write_files


def names(folder: Path, format: str = "csv", train: str = ".", **options: object) -> list[str]:
    data = DataSpec.model_validate({"format": format, "train": train, **options})
    return [file.name for file in listed(data, folder)]


def test_a_directory_gives_the_files_of_the_format_in_order_of_name(tmp_path: Path) -> None:
    write_files(tmp_path, {"b.csv": "x", "a/c.csv": "x", "a.parquet": "x", "part-00000": "x", "z.csv.gz": "x"})
    assert names(tmp_path) == ["a/c.csv", "b.csv", "part-00000", "z.csv.gz"]


@pytest.mark.parametrize(
    "clutter",
    [
        *("_SUCCESS", "_metadata", "_temporary/0/a.csv", ".DS_Store", ".a.csv.crc", ".hidden/a.csv", "a.csv.crc", "a.csv.tmp"),
        *("README.md", "README", "LICENSE", "SHA256SUMS", "Thumbs.db", "a.csv~", "day_$folder$", "@eaDir/a.csv/b.csv"),
    ],
)
@pytest.mark.parametrize("train", [".", "*", "**"])
def test_clutter_is_never_data(tmp_path: Path, clutter: str, train: str) -> None:
    write_files(tmp_path, {"a.csv": "x", clutter: "x"})
    assert names(tmp_path, train=train) == ["a.csv"]


def test_a_file_of_the_format_is_data_whatever_it_is_called(tmp_path: Path) -> None:
    pictures = ["_DSC0001.JPG", "_background/1.png", "license_plate_1.jpg", "notices/2.jpg"]
    write_files(tmp_path, dict.fromkeys(pictures, "x"))
    assert names(tmp_path, "images") == pictures


def test_numbers_behind_the_extension_do_not_count(tmp_path: Path) -> None:
    shards = [f"a.csv-{number:05d}-of-00002" for number in range(2)]
    write_files(tmp_path, dict.fromkeys(shards, "x"))
    assert names(tmp_path, "csv") == shards


def test_what_a_directory_leaves_out_is_counted_and_the_first_are_named(tmp_path: Path) -> None:
    write_files(tmp_path, dict.fromkeys(["a.csv", "b.csv.xz", "c.txt", "d.tab.old", "e.parquet", "_SUCCESS", "README.md"], "x"))
    data = DataSpec(format="csv", train=".")
    listing = list_source(data, tmp_path, format_of(data).extensions)
    assert [Path(left).name for left in listing.left_out] == ["b.csv.xz", "c.txt", "d.tab.old", "e.parquet"]
    assert "4 files" in listing.describe_left_out() and f"{tmp_path}/b.csv.xz" in listing.describe_left_out()
    named = DataSpec(format="csv", train="*.csv")
    assert not list_source(named, tmp_path, format_of(named).extensions).describe_left_out()


def test_one_file_is_taken_whatever_its_name(tmp_path: Path) -> None:
    write_files(tmp_path, {"README.data": "x", "b.csv": "x"})
    assert names(tmp_path, train="README.data") == ["README.data"]


def test_a_glob_takes_files_of_any_extension(tmp_path: Path) -> None:
    write_files(tmp_path, {"y=1/a.dat": "x", "y=2/b.dat": "x", "z/c.dat": "x"})
    assert names(tmp_path, train="y=*/*.dat") == ["y=1/a.dat", "y=2/b.dat"]


def test_a_name_with_brackets_is_a_name_where_it_exists(tmp_path: Path) -> None:
    write_files(tmp_path, {"set[1]/a.csv": "x", "set1/b.csv": "x"})
    assert names(tmp_path, train="set[1]") == ["a.csv"]


def test_files_carry_size_and_a_fingerprint_that_follows_the_content(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.csv": "x\n1\n"})
    data = DataSpec(format="csv", train="a.csv")
    before = listed(data, tmp_path)[0]
    write_files(tmp_path, {"a.csv": "x\n2\n"})
    after = listed(data, tmp_path)[0]
    assert before.size_bytes == after.size_bytes == 4
    assert before.fingerprint != after.fingerprint
    assert before.uri == str(tmp_path / "a.csv")


def test_locations_come_in_the_order_of_the_splits(tmp_path: Path) -> None:
    write_files(tmp_path, {"te/a.csv": "x", "tr/z.csv": "x", "va/b.csv": "x"})
    data = DataSpec(format="csv", train="tr", validation="va", test="te")
    assert [file.location for file in listed(data, tmp_path)] == ["train", "validation", "test"]


@pytest.mark.parametrize("train", ["set", "set/*", "set/**"])
def test_links_to_files_and_folders_are_followed_and_a_link_back_is_not(tmp_path: Path, train: str) -> None:
    write_files(tmp_path, {"blobs/1": "x", "blobs/2": "y", "other/deep/c.csv": "z", "set/d.csv": "w"})
    (tmp_path / "set/a.csv").symlink_to("../blobs/1")
    (tmp_path / "set/b.csv").symlink_to(tmp_path / "blobs/2")
    (tmp_path / "set/more").symlink_to("../other")
    (tmp_path / "other/back").symlink_to("../set")
    assert names(tmp_path, train=train) == ["a.csv", "b.csv", "d.csv", "more/deep/c.csv"]


def test_a_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    write_files(tmp_path, {"real/a.csv": "x"})
    (tmp_path / "latest").symlink_to("real")
    assert names(tmp_path, train="latest") == ["a.csv"]


@pytest.mark.parametrize("train", ["set", "set/*"])
def test_a_link_to_nothing_is_named_unless_it_is_clutter(tmp_path: Path, train: str) -> None:
    write_files(tmp_path, {"set/a.csv": "x"})
    (tmp_path / "set/.#a.csv").symlink_to("editor@host")
    assert names(tmp_path, train=train) == ["a.csv"]
    (tmp_path / "set/b.csv").symlink_to("../blobs/gone")
    with pytest.raises(DataError, match="1 source file is a link to nothing") as caught:
        names(tmp_path, train=train)
    assert caught.value.problems == (f"{tmp_path}/set/b.csv leads to ../blobs/gone",)


def test_any_fsspec_url_is_listed(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    store.pipe("/listing/a.csv", b"x\n1\n")
    assert names(tmp_path, train="memory://listing/") == ["a.csv"]
    section = DataSpec(format="csv", train="memory://listing/")
    before = list_source(section, tmp_path, (".csv",)).files
    store.pipe("/listing/a.csv", b"x\n1\n")
    assert list_source(section, tmp_path, (".csv",)).files == before, "the same content, put there again"
    store.pipe("/listing/a.csv", b"x\n2\n")
    assert list_source(section, tmp_path, (".csv",)).files != before


class Hub(MemoryFileSystem):
    """Says of its files what Hugging Face's hub does: no time, and the digest of git's blob."""

    protocol = "hub"
    store: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("hub://", "memory://")))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        of = super().info(path, **options)
        blob = hashlib.sha1(self.cat_file(path)).hexdigest() if of["type"] == "file" else None
        return {"name": of["name"], "type": of["type"], "size": of["size"], "blob_id": blob}

    def find(self, path: str, **options: Any) -> dict[str, dict[str, Any]]:  # type: ignore[override]
        return {name: self.info(name) for name in super().find(path, **{**options, "detail": False})}


class Many(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Lists 20,000 objects with the facts that S3 gives of each."""

    protocol = "many"
    cachable = False
    isfile = exists = lambda self, path, **options: False
    ls = lambda self, path, **options: []  # noqa: E731

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("many://")

    def unstrip_protocol(self, name: str) -> str:
        return f"many://{name}"

    def find(self, path: str, **options: Any) -> dict[str, dict[str, Any]]:  # type: ignore[override]
        return {of["name"]: of for of in (self._facts(f"{path}/part-{number:07d}.parquet", number) for number in range(20_000))}

    def _facts(self, name: str, number: int) -> dict[str, Any]:
        facts = {
            "ETag": f'"{number:032x}"',
            "LastModified": dt.datetime(2026, 11, 28, tzinfo=dt.UTC),
            "StorageClass": "STANDARD",
        }
        return {"Key": name, **facts, "Size": 1 << 20, "size": 1 << 20, "type": "file", "name": name}


def test_listing_of_many_objects_takes_under_1_kb_each(tmp_path: Path) -> None:
    fsspec.register_implementation("many", Many, clobber=True)
    data = DataSpec(format="parquet", train="many://bucket/rows")
    tracemalloc.start()
    try:
        files = list_source(data, tmp_path, (".parquet",)).files
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(files) == 20_000 and files[7].fingerprint == f"{7:032x}"
    assert kept / len(files) < 560 and peak / len(files) < 900


class Guarded(MemoryFileSystem):
    """Lists folder by folder, as a store of sftp does, and not what is in one called `closed`."""

    protocol = "guarded"
    store: ClassVar[dict[str, Any]] = {}
    find = AbstractFileSystem.find

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("guarded://", "memory://")))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        if path.rstrip("/").endswith("closed"):
            raise PermissionError(f"may not list {path}")
        return super().ls(path, detail, **options)


@pytest.mark.parametrize("train", ["guarded://rows", "guarded://rows/**/*.csv", "guarded://rows/*"])
def test_a_folder_that_a_store_does_not_show_is_named_and_not_left_out(tmp_path: Path, train: str) -> None:
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    Guarded().pipe({f"/rows/{name}": b"x\n1\n" for name in ("a.csv", "closed/b.csv", "open/c.csv")})
    with pytest.raises(ServiceError, match="may not list /rows/closed"):
        names(tmp_path, train=train)
    assert names(tmp_path, train="guarded://rows/open") == ["c.csv"]
    assert names(tmp_path, train="guarded://rows/*.csv") == ["a.csv"]


def test_a_file_of_a_hub_is_known_by_its_blob() -> None:
    fsspec.register_implementation("hub", Hub, clobber=True)
    data = DataSpec.model_validate({"format": "csv", "train": "hub://datasets/flowers/"})
    found = []
    for content in (b"x\n1\n", b"x\n2\n"):  # of equal size
        Hub().pipe("/datasets/flowers/a.csv", content)
        (file,) = listed(data, Path())
        assert file.fingerprint == hashlib.sha1(content).hexdigest()
        with unchanged((file,)):
            found.append(file)
    with pytest.raises(DataError, match=r"a\.csv: was replaced"), unchanged((found[0],)):
        pass


@pytest.mark.parametrize("train", ["nowhere", "nowhere.csv", "*.csv"])
def test_a_missing_location_is_named(tmp_path: Path, train: str) -> None:
    with pytest.raises(DataError, match=r"data\.train: .*matches no file") as caught:
        names(tmp_path, train=train)
    assert str(tmp_path / train) in caught.value.message


def test_a_directory_without_files_of_the_format_shows_what_is_there(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.csv": "x"})
    with pytest.raises(DataError, match="no parquet file in") as caught:
        names(tmp_path, "parquet")
    assert caught.value.problems == ("skipped: a.csv",)


def test_a_file_in_two_splits_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path, {"all/a.csv": "x", "all/test/b.csv": "x"})
    with pytest.raises(DataError, match="two splits") as caught:
        names(tmp_path, train="all", test="all/test")
    file = f"{tmp_path}/all/test/b.csv"
    assert caught.value.problems == (f"{file} in data.test is {file} in data.train",)


@pytest.mark.parametrize(
    ("table", "log", "step"),
    [
        ("Delta", "_delta_log/00000000000000000001.json", "data.format: delta"),
        ("Iceberg", "metadata/v3.metadata.json", "data.format: iceberg"),
        ("Hudi", ".hoodie/hoodie.properties", "export its rows as Parquet to a folder outside the table"),
        ("Lance", "_versions/1.manifest", "data.format: lance"),
        ("Spark streaming", "_spark_metadata/0", "let Spark write the rows that count to another folder"),
    ],
)
def test_a_table_with_a_log_of_its_own_is_no_folder_of_files(tmp_path: Path, table: str, log: str, step: str) -> None:
    write_files(tmp_path, {f"t/{log}": "x", "t/part-0.parquet": "x", "t/part-1.parquet": "x"})
    write_files(tmp_path, {"t/day=1/part-2.parquet": "x", "beside/a.parquet": "x"})
    for train in ("t", ".", "t/part-*", "t/**/*.parquet", "t/day=1", "t/day=*", "t/part-0.parquet", "*/*.parquet"):
        with pytest.raises(DataError, match=f"is a {table} table, or a part of one") as caught:
            names(tmp_path, "parquet", train=train)
        assert step in caught.value.next_step
    assert names(tmp_path, "parquet", train="beside/*") == ["a.parquet"]


@pytest.mark.parametrize("train", ["t", "t/*", "t/part-0000*"])
def test_files_of_uncommitted_databricks_write_refused(tmp_path: Path, train: str) -> None:
    whole, failed = "part-00000-tid-111-a-c000.snappy.parquet", "part-00000-tid-222-b-c000.snappy.parquet"
    write_files(tmp_path, dict.fromkeys([f"t/{whole}", "t/_started_111", "t/_committed_111", "t/_SUCCESS"], "x"))
    assert names(tmp_path, "parquet", train=train) == [whole]
    write_files(tmp_path, {f"t/{failed}": "x", "t/_started_222": "x"})
    with pytest.raises(DataError, match=r"tid-222-b.* has not been committed: there is .*/_started_222"):
        names(tmp_path, "parquet", train=train)


@pytest.mark.parametrize("train", ["t", "t/base_*", "t/*/bucket_*", "t/base_0000002"])
@pytest.mark.parametrize("folder", ["base_0000002", "base_0000002_v0000044", "delta_0000003_0000003_0000"])
def test_files_of_transactional_hive_table_refused(tmp_path: Path, folder: str, train: str) -> None:
    write_files(tmp_path, dict.fromkeys(["t/base_0000002/bucket_00000", f"t/{folder}/bucket_00001"], "x"))
    with pytest.raises(DataError, match=r"bucket_0000. belongs to a transactional table of Hive"):
        names(tmp_path, "orc", train=train)


@pytest.mark.parametrize("format", ["huggingface", "arrow"])
@pytest.mark.parametrize("train", ["ds", "ds/*/*.arrow", "."])
def test_folder_of_dataset_dict_refused_by_splits(tmp_path: Path, format: str, train: str) -> None:
    files = ["ds/train/data-00000-of-00001.arrow", "ds/test/data-00000-of-00001.arrow"]
    write_files(tmp_path, {"ds/dataset_dict.json": '{"splits": ["train", "test"]}', **dict.fromkeys(files, "x")})
    with pytest.raises(DataError, match="ds holds a DatasetDict, whose splits are folders: train, test") as refused:
        names(tmp_path, format, train=train)
    assert refused.value.next_step.endswith("/ds/train")
    assert names(tmp_path, format, train="ds/train") == ["data-00000-of-00001.arrow"]


def test_file_in_zip_archive_is_read_by_its_chain(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "kaggle.zip", "w") as archive:
        archive.writestr("a.csv", "x\n1\n")
        archive.writestr("day/b.csv.gz", gzip.compress(b"x\n2\n"))
        archive.writestr("c.parquet", "x")
    for train, rows in (("zip://a.csv::kaggle.zip", [1]), ("zip://day/*::kaggle.zip", [2]), ("zip://::kaggle.zip", [1, 2])):
        assert read_rows(tmp_path, "csv", train=train)["x"].to_pylist() == rows
    first = listed(DataSpec(format="csv", train="zip://a.csv::kaggle.zip"), tmp_path)[0].fingerprint
    with zipfile.ZipFile(tmp_path / "kaggle.zip", "w") as archive:
        archive.writestr("a.csv", "x\n3\n")
    assert listed(DataSpec(format="csv", train="zip://a.csv::kaggle.zip"), tmp_path)[0].fingerprint != first


def test_escaped_name_of_partition_is_unescaped(tmp_path: Path) -> None:
    write_files(tmp_path, {"my%20city=S%C3%A3o%20Paulo/a.csv": "x\n1\n"})
    assert read_rows(tmp_path, "csv")["my city"].to_pylist() == ["S\xe3o Paulo"]


def test_split_rules_that_leave_nothing_to_train_on_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="add up to 1 or more"):
        names(tmp_path, train="nowhere", validation={"fraction": 0.5}, test={"fraction": 0.5})


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server of files that writes no log."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def test_a_dead_endpoint_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"x\.csv matches no file, or its bucket or server is not there") as missing:
        names(tmp_path, train="http://127.0.0.1:1/x.csv")
    assert missing.value.next_step == "start the server, or correct data.train"
    with pytest.raises(ServiceError, match="needs a package that is not installed: ") as caught:
        names(tmp_path, train="dropbox://folder/x.csv")
    assert "install it on " in caught.value.next_step
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(DataError, match=r"none\.csv matches no file"):
            names(tmp_path, train=f"http://127.0.0.1:{server.server_port}/none.csv")
        server.shutdown()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ServiceError, match=r"http://127\.0\.0\.1:1 does not answer") as caught:
        names(tmp_path, train="s3://bucket/data/")
    assert "AWS_ENDPOINT_URL" in caught.value.next_step
