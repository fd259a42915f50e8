"""How do TensorFlow's records become rows? Each is framed by its length and checksums, and holds one `tf.train.Example`.

Source: the layout in tensorflow/core/lib/io/record_writer.h and tensorflow/core/example/feature.proto.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

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

_FIELD = descriptor_pb2.FieldDescriptorProto

_MESSAGES: dict[str, dict[str, Any]] = {
    "Bytes": {"value": _FIELD.TYPE_BYTES},
    "Floats": {"value": _FIELD.TYPE_FLOAT},
    "Integers": {"value": _FIELD.TYPE_INT64},
    "Feature": {"bytes_list": "Bytes", "float_list": "Floats", "int64_list": "Integers"},
    "Entry": {"key": _FIELD.TYPE_STRING, "value": "Feature"},
    "Features": {"feature": "Entry"},
    "Example": {"features": "Features"},
}
"""Message -> its fields, numbered from 1, with their types."""

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
                except (ValueError, DecodeError) as error:
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
    """Parse the features of an Example. Raises ValueError or protobuf's DecodeError if it is not an Example.

    Protobuf keeps a field that a message lacks, or that is written as another type, apart from its values.
    """
    found: Features = {}
    example = _example_class().FromString(record)
    _refuse_unknown(example)
    _refuse_unknown(example.features)
    for entry in example.features.feature:
        if not entry.HasField("key"):
            raise ValueError("an entry has no name")
        if not isinstance(entry.key, str):
            raise ValueError(f"the feature name {entry.key!r} is not UTF-8")
        _refuse_unknown(entry)
        _refuse_unknown(entry.value)
        for field, values in entry.value.ListFields():
            _refuse_unknown(values)
            found[entry.key] = field.number, list(values.value)
    return found


def _refuse_unknown(message: Any) -> None:
    if unknown := [field.field_number for field in UnknownFieldSet(message)]:
        raise ValueError(f"its {message.DESCRIPTOR.name} has a field {unknown[0]} that is unknown or of another type")


@functools.cache
def _example_class() -> Any:
    """Make the message class from its definition: that of TensorFlow needs TensorFlow."""
    file = descriptor_pb2.FileDescriptorProto(name="penstock/example.proto", package="penstock")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for number, (name, kind) in enumerate(fields.items(), 1):
            of = {"type": kind} if isinstance(kind, int) else {"type": _FIELD.TYPE_MESSAGE, "type_name": f".penstock.{kind}"}
            repeated = name in ("value", "feature") and message != "Entry"
            described.field.add(name=name, number=number, label=3 if repeated else 1, **of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("penstock.Example"))
