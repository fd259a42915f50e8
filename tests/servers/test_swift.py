"""Is the S3 test server worth believing? It must check signatures, keep what it was given, and come back after a kill."""

from __future__ import annotations

import os

import boto3
import pytest
from botocore.exceptions import ClientError

from penstock.storage import Storage, filesystem_of
from tests.servers.swift import SwiftServer


def test_what_is_written_is_read_back_and_listed(s3_bucket: str) -> None:
    storage = Storage(f"{s3_bucket}/some/prefix")
    storage.write_bytes("folder/name.bin", b"content")
    assert storage.read_bytes("folder/name.bin") == b"content"
    assert storage.list("folder") == ["name.bin"]
    storage.delete("folder")
    assert not storage.exists("folder/name.bin")


def test_a_wrong_secret_is_refused(s3_bucket: str) -> None:
    client = boto3.session.Session().client("s3", aws_secret_access_key="wrong", aws_access_key_id=SwiftServer.access_key)
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        client.list_objects_v2(Bucket=s3_bucket.removeprefix("s3://"))


def test_an_upload_in_parts_is_put_together(s3_bucket: str) -> None:
    data = os.urandom(12 << 20)
    storage = Storage(s3_bucket)
    with filesystem_of(s3_bucket)[0].open(f"{s3_bucket}/big.bin", "wb", block_size=5 << 20) as handle:
        handle.write(data)
    assert storage.read_bytes("big.bin") == data


def test_a_killed_server_comes_back_with_its_data(s3_bucket: str, s3_server: SwiftServer) -> None:
    storage = Storage(s3_bucket)
    storage.write_bytes("before.bin", b"kept")
    s3_server.kill()
    s3_server.start()
    assert storage.read_bytes("before.bin") == b"kept"
