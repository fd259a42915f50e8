"""How do samples in tar archives become rows, as WebDataset lays them out?

Members that follow each other and share the name up to the first dot of its last part are one sample; the text behind that
dot names the column and the way it is read.
"""

from __future__ import annotations

import io
import json
import posixpath
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.columns.casts import canonical_type, cast_array, promote
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_stream
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, conform, reading
from penstock.ingest.spec import DataSpec
from penstock.messages import shorten

__all__ = ["WebDatasetFormat", "WebDatasetReader"]

_TABLE_BYTES = 16 << 20

_IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif")

_IMAGE_TYPE = pa.struct({"bytes": pa.binary(), "path": pa.string()})

_NUMBERS = ("cls", "cls2", "index", "inx", "id")

_TEXTS = ("txt", "text", "transcript")


class WebDatasetFormat(Format):
    """Tar shards of samples: `a.jpg`, `a.cls`, `a.json` are one row; may be compressed.

    Images are in `image` (`seg.png` in `seg`), `cls` and `index` are integers, `txt` is text, `json` a struct, `npy` a list,
    and the rest is bytes. `key` is the sample's name.
    """

    extensions = (".tar",)
    not_features = ("key",)

    def reader(self, data: DataSpec, options: None) -> WebDatasetReader:
        """Read samples."""
        return WebDatasetReader()


class WebDatasetReader(Reader):
    """Samples of tar archives, in their order. A sample may lack a member, which is null then."""

    missing_is_null = True

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read every sample, and join the types of what they hold."""
        columns: dict[str, pa.DataType] = {}
        rows = 0
        for samples in self._samples(file):
            for name in dict.fromkeys(name for sample in samples for name in sample):
                kind, seen = _column(file, name, samples, rows).type, columns.get(name, pa.null())
                joined = promote(seen, canonical_type(kind))
                if joined is None:
                    raise DataError(
                        f"{file.uri}: {name!r} is {seen} in samples before {rows}, and {kind} from there on",
                        next_step="write the samples alike",
                    )
                columns[name] = joined
            rows += len(samples)
        return FileFacts(columns, rows)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, about 16 MiB at a time."""
        first_row = 0
        for samples in self._samples(file):
            columns = {field.name: _column(file, field.name, samples, first_row) for field in schema}
            yield conform(pa.table(columns), schema, file, first_row)
            first_row += len(samples)

    def _samples(self, file: SourceFile) -> Iterator[list[dict[str, Any]]]:
        held: list[dict[str, Any]] = []
        size = 0
        with (
            reading(file, "a tar archive"),
            open_stream(file.uri) as stream,
            tarfile.open(fileobj=stream, mode="r|") as archive,
        ):
            for member in archive:
                folder, name = posixpath.split(member.name)
                if not member.isfile() or name.startswith("."):
                    continue
                key, _, suffix = name.partition(".")
                key = posixpath.join(folder, key)
                if not held or held[-1]["key"] != key:
                    if size >= _TABLE_BYTES:
                        yield held
                        held, size = [], 0
                    held.append({"key": key})
                content = archive.extractfile(member).read()  # type: ignore[union-attr]
                column, value = _value(file, member.name, suffix.lower(), content)
                if column in held[-1]:
                    raise DataError(
                        f"{file.uri}: sample {key!r} has {column!r} twice", next_step="give each sample a name of its own"
                    )
                held[-1][column] = value
                size += len(content)
        if held:
            yield held


def _value(file: SourceFile, member: str, suffix: str, content: bytes) -> tuple[str, Any]:
    """Return (column, value) of a member."""
    name, _, kind = suffix.rpartition(".")
    try:
        if kind in _IMAGES:
            return name or "image", {"bytes": content, "path": member}
        if kind in _NUMBERS:
            return suffix, int(content)
        if kind in _TEXTS:
            return suffix, content.decode()
        if kind == "json":
            return suffix, json.loads(content)
        if kind == "npy":
            return suffix, np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise DataError(
            f"{file.uri}: {member} holds {shorten(content[:80])}, which is not {kind}: {error}",
            next_step="write the sample again",
        ) from error
    return suffix or "value", content


def _column(file: SourceFile, name: str, samples: list[dict[str, Any]], first_row: int) -> pa.Array:
    values = [sample.get(name) for sample in samples]
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if arrays:
        entry = pa.from_numpy_dtype(np.result_type(*arrays))
        nested: pa.DataType = entry
        for _ in range(max(array.ndim for array in arrays)):
            nested = pa.list_(nested)
        return pa.array([value.tolist() if isinstance(value, np.ndarray) else value for value in values], nested)
    images = any(isinstance(value, dict) and value.keys() == {"bytes", "path"} for value in values)
    try:
        return (
            cast_array(pa.array(values, _IMAGE_TYPE) if images else pa.array(values), _IMAGE_TYPE)
            if images
            else pa.array(values)
        )
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"{file.uri}: samples {first_row} to {first_row + len(samples) - 1} (from 0): {name!r} holds values of several "
            f"kinds: {error}",
            next_step="write the samples alike",
        ) from error
