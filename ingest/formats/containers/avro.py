"""How are Avro files read? Each holds its schema, which gives the columns' types; records come a block at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from penstock.errors import DataError, PreflightError
from penstock.ingest.columns.casts import canonical_type
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import open_input
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, conform, library, reading
from penstock.ingest.spec import DataSpec

__all__ = ["AvroFormat", "AvroReader"]

_PLAIN = {
    **{"null": pa.null(), "boolean": pa.bool_(), "int": pa.int32(), "long": pa.int64()},
    **{"float": pa.float32(), "double": pa.float64(), "bytes": pa.binary(), "string": pa.string()},
}

_LOGICAL = {
    **{"date": pa.date32(), "time-millis": pa.time32("ms"), "time-micros": pa.time64("us"), "uuid": pa.string()},
    **{"timestamp-millis": pa.timestamp("ms", "UTC"), "timestamp-micros": pa.timestamp("us", "UTC")},
    **{"local-timestamp-millis": pa.timestamp("ms"), "local-timestamp-micros": pa.timestamp("us")},
}


class AvroFormat(Format):
    """Records with their types, as Kafka and Hadoop write them."""

    extensions = (".avro",)
    libraries = ("fastavro",)

    def reader(self, data: DataSpec, options: None) -> AvroReader:
        """Read records."""
        return AvroReader()


class AvroReader(Reader):
    """Avro container files, some records at a time."""

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read every block, since only the blocks know how many records they hold."""
        with _opened(file, "block_reader") as blocks:
            columns = {name: canonical_type(kind) for name, kind in _types(file, blocks).items()}
            return FileFacts(columns, sum(block.num_records for block in blocks))

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows."""
        first_row = 0
        with _opened(file, "reader") as records:
            kinds = _types(file, records)
            while some := list(itertools.islice(records, batch_rows)):
                columns = {name: pa.array([_plain(row[name]) for row in some], kinds[name]) for name in schema.names}
                yield conform(pa.table(columns), schema, file, first_row)
                first_row += len(some)


@contextmanager
def _opened(file: SourceFile, reader: str) -> Iterator[Any]:
    fastavro = library("fastavro", "avro", "avro")
    with reading(file, "Avro"), open_input(file.uri) as source:
        try:
            yield getattr(fastavro, reader)(source)
        except ValueError as error:
            if "codec is supported but" not in str(error):
                raise
            raise PreflightError(
                f"{file.uri}: {error}",
                next_step='pip install "penstock[avro]" (snappy), backports.zstd or lz4, on every node too',
            ) from error
        except OverflowError as error:
            raise DataError(
                f"{file.uri}: holds a time before the year 1 or after 9999, which fastavro does not read ({error})",
                next_step="correct it there, or leave the column out when you write the file",
            ) from error


def _types(file: SourceFile, found: Any) -> dict[str, pa.DataType]:
    schema = library("fastavro.schema", "avro", "avro").expand_schema(found.writer_schema)
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise DataError(f"{file.uri}: holds {schema}, not records", next_step="write records with named fields")
    return {field["name"]: _type(file, field["name"], field["type"]) for field in schema["fields"]}


def _type(file: SourceFile, column: str, kind: Any) -> pa.DataType:
    """Return the Arrow type of an Avro type; a union with null is a type that may be null."""
    if isinstance(kind, list):
        others = [each for each in kind if each != "null"]
        if len(others) > 1:
            raise DataError(
                f"{file.uri}: column {column!r} is a union of {len(others)} types ({others}), which is not one type",
                next_step="leave it out of data.columns, or write it as one type",
            )
        return _type(file, column, others[0]) if others else pa.null()
    if isinstance(kind, dict):
        return _made(file, column, kind)
    if kind not in _PLAIN:
        raise DataError(
            f"{file.uri}: column {column!r} holds records {kind!r} that hold others of their kind, to any depth",
            next_step="leave it out of data.columns",
        )
    return _PLAIN[kind]


def _made(file: SourceFile, column: str, kind: dict[str, Any]) -> pa.DataType:
    logical = kind.get("logicalType")
    if logical == "decimal":
        digits, scale = kind["precision"], kind.get("scale", 0)
        return pa.decimal128(digits, scale) if digits <= 38 else pa.decimal256(digits, scale)
    if logical in _LOGICAL:
        return _LOGICAL[logical]
    name = kind["type"]
    if name == "record":
        return pa.struct([pa.field(field["name"], _type(file, column, field["type"])) for field in kind["fields"]])
    if name == "array":
        return pa.list_(_type(file, column, kind["items"]))
    if name == "map":
        return pa.map_(pa.string(), _type(file, column, kind["values"]))
    if name == "enum":
        return pa.string()
    return pa.binary(kind["size"]) if name == "fixed" else _type(file, column, name)


def _plain(value: Any) -> Any:
    return str(value) if type(value).__name__ == "UUID" else value
