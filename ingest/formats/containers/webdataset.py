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
from penstock.ingest.columns.casts import canonical_type, promote
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_stream
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.json_text import unique_keys
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
        return WebDatasetReader(data.read_columns)


class WebDatasetReader(Reader):
    """Samples of tar archives, in their order. A sample may lack a member, which is null then."""

    missing_is_null = True

    def __init__(self, columns: list[str] | None) -> None:
        self._columns = columns

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
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive,
        ):
            for member in archive:
                folder, name = posixpath.split(member.name)
                if member.islnk() or member.issym():
                    raise DataError(
                        f"{file.uri}: {member.name} is a link to {member.linkname}, and not a file",
                        next_step="write the archive with the files behind links: tar --dereference --hard-dereference",
                    )
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
                column, kind = _meaning(suffix.lower())
                unread = self._columns is not None and column not in self._columns
                value = None if unread else _value(file, member.name, kind, content)
                if column in held[-1]:
                    raise DataError(
                        f"{file.uri}: sample {key!r} has {column!r} twice", next_step="give each sample a name of its own"
                    )
                held[-1][column] = value
                size += len(content)
            while behind := archive.fileobj.read(_TABLE_BYTES):  # type: ignore[union-attr]
                if behind.strip(b"\0"):
                    raise ValueError(
                        "there are data behind its end mark: unpack archives that were put together, and write one"
                    )
        if held:
            yield held


class _Member(tarfile.TarInfo):
    """A member whose header is whole. tarfile takes one that is damaged, cut off or missing for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            raise ValueError(f"no whole header, nor an end mark, at byte {archive.offset}: {error}") from error


def _meaning(suffix: str) -> tuple[str, str]:
    """Return the column of members with such a suffix, and how they are read."""
    name, _, kind = suffix.rpartition(".")
    return (name or "image" if kind in _IMAGES else suffix or "value"), kind


def _value(file: SourceFile, member: str, kind: str, content: bytes) -> Any:
    try:
        if kind in _IMAGES:
            return {"bytes": content, "path": member}
        if kind in _NUMBERS:
            if b"_" in content:
                raise ValueError("digits with an underscore")
            return int(content)
        if kind in _TEXTS:
            return content.decode()
        if kind == "json":
            return json.loads(content, object_pairs_hook=unique_keys)
        if kind == "npy":
            return np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise DataError(
            f"{file.uri}: {member} holds {shorten(content[:80])}, which is not {kind}: {error}",
            next_step="write the sample again, or name the other members in data.columns",
        ) from error
    return content


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
        return pa.array(values, _IMAGE_TYPE if images else None)
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"{file.uri}: samples {first_row} to {first_row + len(samples) - 1} (from 0): {name!r} holds values of several "
            f"kinds: {error}",
            next_step="write the samples alike",
        ) from error
