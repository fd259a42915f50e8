"""Data in one store and storage in another, and public buckets: `stores` of a pipeline file says how each is reached."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pyarrow import fs as arrow_fs

from penstock.errors import PenstockError, PreflightError, ServiceError, SpecError
from penstock.flows.preflight.nodes import NodeNeeds, check_node
from penstock.flows.spec_file import load_spec
from penstock.ingest.files.listing import list_location
from penstock.ingest.files.opening import _arrow_filesystem
from penstock.storage import Storage, filesystem_of
from penstock.stores import StoreSpec, settings_of, use_stores
from tests.ingest.reading import read_rows
from tests.servers.swift import store_client

ROWS = pa.table({"x": [1, 2, 3]})


@pytest.fixture(autouse=True)
def forgotten_after() -> Iterator[None]:
    yield
    use_stores({})


def as_parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(ROWS, sink)
    return sink.getvalue().to_pybytes()


def pipeline(folder: Path, **keys: Any) -> Path:
    file = folder / "pipeline.yaml"
    content = {"name": "stores", "data": {"format": "parquet", "train": "data"}, "train": {"recipe": "model.py:M"}, **keys}
    file.write_text(yaml.safe_dump(content))
    return file


def test_data_are_read_from_one_store_and_kept_in_another(
    tmp_path: Path, s3_bucket: str, rows_bucket: tuple[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, settings = rows_bucket
    store_client(settings).put_object(Bucket=bucket.removeprefix("s3://"), Key="rows/a.parquet", Body=as_parquet())
    file = f"{bucket}/rows/a.parquet"
    with pytest.raises(PenstockError):  # the environment's store has no such bucket
        read_rows(tmp_path, "parquet", train=f"{bucket}/rows/")
    load_spec(pipeline(tmp_path, stores={bucket: settings}))
    assert read_rows(tmp_path, "parquet", train=f"{bucket}/rows/").equals(ROWS)
    storage = Storage(f"{s3_bucket}/state")
    storage.write_bytes("a", b"kept")
    assert storage.read_bytes("a") == b"kept" and Storage(bucket).tree() == {"rows/a.parquet": len(as_parquet())}
    # A node with the variables can do its part; one without gets an error that names them, and their values are nowhere.
    storage.write_bytes("check/token", b"me")
    needs = NodeNeeds(storage, "check", b"me", [(file, len(as_parquet()))])
    assert check_node(needs) == []
    assert settings["env_prefix"] in os.environ["PENSTOCK_STORES"]
    assert os.environ["ROWS_SECRET_ACCESS_KEY"] not in os.environ["PENSTOCK_STORES"]
    monkeypatch.setenv("ROWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(ServiceError, match="refuses the credentials") as refused:
        list_location("parquet", (".parquet",), tmp_path, f"{bucket}/rows/")
    assert "look at `stores`" in refused.value.next_step and "ROWS_ACCESS_KEY_ID" in refused.value.next_step
    monkeypatch.delenv("ROWS_SECRET_ACCESS_KEY")
    with pytest.raises(PreflightError, match="ROWS_SECRET_ACCESS_KEY is not set on"):
        list_location("parquet", (".parquet",), tmp_path, f"{bucket}/rows/")
    ((what, _),) = check_node(needs)
    assert "ROWS_SECRET_ACCESS_KEY is not set on" in what


class PublicBucket(BaseHTTPRequestHandler):
    """What a public bucket answers to a request that is not signed, and 403 to one that is."""

    content: ClassVar[bytes] = as_parquet()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if "Authorization" in self.headers:
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        elif path in ("/public", "/public/"):
            key = f'<Contents><Key>rows/a.parquet</Key><Size>{len(self.content)}</Size><ETag>"e"</ETag></Contents>'
            found = key if "prefix=rows" in query or "prefix=" not in query else ""
            self._answer(200, f"<ListBucketResult><KeyCount>1</KeyCount>{found}</ListBucketResult>".encode())
        elif path == "/public/rows/a.parquet":
            self._answer(206 if "Range" in self.headers else 200, self.content)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 206:
            first, last = (int(each) for each in self.headers["Range"].removeprefix("bytes=").split("-"))
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
            body = body[first : last + 1]
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_a_public_bucket_is_read_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-someone")
    with ThreadingHTTPServer(("127.0.0.1", 0), PublicBucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        store = {"endpoint": f"http://127.0.0.1:{server.server_port}", "region": "us-east-1"}
        load_spec(pipeline(tmp_path, stores={"s3://public": store}))
        with pytest.raises(ServiceError, match="refuses the credentials"):
            list_location("parquet", (".parquet",), tmp_path, "s3://public/rows/")
        load_spec(pipeline(tmp_path, stores={"s3://public": {**store, "anonymous": True}}))
        assert read_rows(tmp_path, "parquet", train="s3://public/rows/").equals(ROWS)
        server.shutdown()


def test_the_longest_address_counts_and_amazon_is_meant_without_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    use_stores({"s3://a": StoreSpec(region="eu-west-1"), "s3://a/b/": StoreSpec(endpoint="https://b.example/", anonymous=True)})
    said = {uri: settings_of(uri) for uri in ("s3://a/x", "s3://a/bc", "s3://a/b", "s3a://a/b/c", "s3://ab/x", "/a/b")}
    assert [spec and (spec.endpoint or spec.region) for spec in said.values()] == [
        *("eu-west-1", "eu-west-1", "https://b.example", "https://b.example", None, None)
    ]
    assert filesystem_of("s3://a/x")[0].config_kwargs == {"ignore_configured_endpoint_urls": True}
    assert _arrow_filesystem("s3://a/x")[0].region == "eu-west-1"


def test_the_region_of_a_bucket_is_asked_once_where_nothing_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def amazon(bucket: str) -> str:
        asked.append(bucket)
        if bucket == "unreached":
            raise OSError("no route to host")
        return "eu-north-1"

    monkeypatch.setattr(arrow_fs, "resolve_s3_region", amazon)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    use_stores({"s3://named": StoreSpec(region="ap-south-1"), "s3://other": StoreSpec(endpoint="http://127.0.0.1:9")})
    places = ("s3://elsewhere/a", "s3://elsewhere/b", "s3://unreached/a", "s3://unreached/b", "s3://named/a", "s3://other/a")
    regions = [_arrow_filesystem(place)[0].region for place in places]
    assert regions == ["eu-north-1", "eu-north-1", "us-west-2", "us-west-2", "ap-south-1", "us-west-2"]
    assert asked == ["elsewhere", "unreached"]


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    wrong = {"s3://a": {"anonymous": True, "env_prefix": "A"}, "b": {}, "s3://c": {"endpoint": "https://me:secret@c.example"}}
    with pytest.raises(SpecError) as refused:
        load_spec(pipeline(tmp_path, stores=wrong))
    assert len(refused.value.problems) == 3
    assert "anonymous takes no credentials; leave out env_prefix" in str(refused.value)
