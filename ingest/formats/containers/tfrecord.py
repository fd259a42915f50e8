"""How do TensorFlow's records become rows? Each is framed by its length and checksums, and holds one `tf.train.Example`.

Source: the layout in tensorflow/core/lib/io/record_writer.h and tensorflow/core/example/feature.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.columns.casts import promote
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_stream
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, conform, library, reading
from penstock.ingest.spec import DataSpec

__all__ = ["TFRecordFormat", "TFRecordReader"]

_TABLE_BYTES = 16 << 20

_KINDS = {1: pa.binary(), 2: pa.float32(), 3: pa.int64()}
"""Field of a Feature -> type of its values."""

Features = dict[str, tuple[int, list[Any]]]
"""Name -> (field of the Feature, values)."""


class TFRecordFormat(Format):
    """Records of `tf.train.Example`; may be compressed. A feature of at most one value a record is a scalar, else a list."""

    extensions = (".tfrecord", ".tfrecords")
    libraries = ("google-crc32c",)

    def reader(self, data: DataSpec, options: None) -> TFRecordReader:
        """Read records."""
        return TFRecordReader()


class TFRecordReader(Reader):
    """Examples, in their order; a feature that an example lacks is null."""

    missing_is_null = True

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read every record and its checksums."""
        columns: dict[str, pa.DataType] = {}
        empty: dict[str, pa.DataType] = {}
        rows = 0
        for examples in self._examples(file):
            for example in examples:
                for name, (kind, values) in example.items():
                    if not values:  # missing, if other records have one value
                        empty[name] = pa.list_(_KINDS[kind])
                        continue
                    found = _KINDS[kind] if len(values) == 1 else pa.list_(_KINDS[kind])
                    seen = columns.get(name, found)
                    if pa.types.is_list(seen) != pa.types.is_list(found):
                        seen, found = (each if pa.types.is_list(each) else pa.list_(each) for each in (seen, found))
                    joined = promote(seen, found) if seen == found else None
                    if joined is None:
                        raise DataError(
                            f"{file.uri}: feature {name!r} is {seen} before record {rows} (from 0), and {found} there",
                            next_step="write the records alike",
                        )
                    columns[name] = joined
                rows += 1
        return FileFacts(empty | columns, rows)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, about 16 MiB at a time."""
        first_row = 0
        for examples in self._examples(file):
            columns = {field.name: _column(field, examples) for field in schema}
            yield conform(pa.table(columns), schema, file, first_row)
            first_row += len(examples)

    def _examples(self, file: SourceFile) -> Iterator[list[Features]]:
        held: list[Features] = []
        size = 0
        with reading(file, "TFRecord"), open_stream(file.uri) as stream:
            for number, record in enumerate(_records(stream)):
                try:
                    held.append(_features(record))
                except (ValueError, LookupError, struct.error) as error:
                    raise DataError(
                        f"{file.uri}: record {number} (from 0) is not a tf.train.Example: {error}",
                        next_step="write tf.train.Example records, or read others in a function: data.format: python",
                    ) from error
                size += len(record)
                if size >= _TABLE_BYTES:
                    yield held
                    held, size = [], 0
        if held:
            yield held


def _records(stream: pa.NativeFile) -> Iterator[bytes]:
    crc32c = library("google_crc32c", "tfrecord", "tfrecord")
    number = 0
    while header := bytes(stream.read(12)):
        if len(header) < 12 or struct.unpack("<I", header[8:])[0] != _masked(crc32c.value(header[:8])):
            raise ValueError(f"record {number} (from 0)")
        length = struct.unpack("<Q", header[:8])[0]
        record, checksum = bytes(stream.read(length)), bytes(stream.read(4))
        if len(checksum) < 4 or struct.unpack("<I", checksum)[0] != _masked(crc32c.value(record)):
            raise ValueError(f"record {number} (from 0): its checksum is another")
        yield record
        number += 1


def _masked(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _column(field: pa.Field, examples: list[Features]) -> pa.Array:
    nested = pa.types.is_list(field.type) or pa.types.is_large_list(field.type)
    found = [example.get(field.name) for example in examples]
    kind = next((_KINDS[each[0]] for each in found if each), pa.null())
    if nested:
        return pa.array([each and each[1] for each in found], pa.list_(kind))
    return pa.array([each[1][0] if each and each[1] else None for each in found], kind)


def _features(record: bytes) -> Features:
    """Parse the features of an Example. Raises ValueError, IndexError or struct.error if it is not one."""
    found: Features = {}
    for number, features in _message(record):
        if number != 1:
            raise ValueError(f"it has a field {number}")
        for _, entry in _message(features):
            parts = dict(_message(entry))
            if 1 not in parts:
                raise ValueError("an entry has no name")
            name, feature = bytes(parts[1]).decode(), parts.get(2, b"")
            for kind, values in _message(feature):
                found[name] = kind, list(_values(kind, values))
    return found


def _values(kind: int, message: bytes) -> Iterator[Any]:
    for number, value in _message(message):
        if kind not in _KINDS or number != 1:
            raise ValueError(f"it has a list of kind {kind}")
        if kind == 1:
            yield value
        elif kind == 2:
            yield from np.frombuffer(value, "<f4").tolist()  # packed, or one value
        elif isinstance(value, int):
            yield _signed(value)
        else:
            position = 0
            while position < len(value):
                found, position = _varint(value, position)
                yield _signed(found)


def _message(data: bytes) -> Iterator[tuple[int, Any]]:
    """Return (field number, value) of a message: bytes, or an int for a varint."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        length = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            length, position = _varint(data, position)
        if length is None or position + length > len(data):
            raise ValueError("its parts do not fit")
        yield tag >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
