"""How is JSON read, one object a row, with the line named when something is wrong?

Blocks of whole lines go through pyarrow's parser; only a block it refuses is gone through again in Python, line by line.
"""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from penstock.errors import DataError
from penstock.ingest.columns.casts import canonical_type, cast_array, first_bad_row, fits_double, is_list, is_text, promote
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import can_be_cut, open_head, open_span
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.json_text import (
    Block,
    file_blocks,
    has_long_integer,
    is_array,
    line_blocks,
    read_head,
    unique_keys,
)
from penstock.ingest.formats.reader import Cuts, FileFacts, Keep, Reader, last_cut, rows_between
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml, shorten

__all__ = ["JsonFormat", "JsonReader"]


class JsonFormat(Format):
    """One object a line, or one array of objects; may be compressed."""

    extensions = (".json", ".jsonl", ".ndjson")

    def reader(self, data: DataSpec, options: None) -> JsonReader:
        """Read objects."""
        return JsonReader(data)


class JsonReader(Reader):
    """One JSON object a row. A missing key is null; text stays text, also where it looks like a time."""

    missing_is_null = True
    hands_on_rows = True

    def __init__(self, data: DataSpec) -> None:
        self._types = {name: parse_type(text) for name, text in data.types.items()}
        self._columns = None if data.read_columns is None else dict.fromkeys(data.read_columns)

    def inspect(self, file: SourceFile, keep: Keep | None = None) -> FileFacts:
        """Parse the whole file; the types of its blocks are joined."""
        return self._seen(file, file_blocks(file), keep)

    def inspect_head(self, file: SourceFile, head_bytes: int) -> FileFacts | None:
        """See `Reader.inspect_head`: the lines that end there."""
        with open_head(file.uri, head_bytes) as stream:
            head = read_head(stream)
            is_cut = can_be_cut(file.uri) and not is_array(head)
            return self._seen(file, line_blocks(file, stream, head), None) if is_cut else None

    def _seen(self, file: SourceFile, blocks: Iterator[Block], keep: Keep | None) -> FileFacts:
        rows, cuts = 0, Cuts()
        columns: dict[str, pa.DataType] = {}
        for block in blocks:
            table = self._parse(file, block, None)
            if block.at is not None and can_be_cut(file.uri):
                cuts.add(rows, block.at, block.lines[0])
            if keep is not None:
                keep(self._as_read(table))
            for field in table.schema:
                seen = columns.get(field.name, pa.null())
                kind = promote(seen, _kind_read(field.type))
                if kind is None:
                    raise DataError(
                        f"{file.uri}: column {field.name!r} is {seen} before line {block.lines[0]}, and {field.type} from "
                        "there on",
                        next_step=f"repair the lines, or set data.types: {{{in_yaml(field.name)}: string}}",
                    )
                columns[field.name] = kind
            rows += block.rows
        return FileFacts(columns, rows, cuts=cuts.found())

    def _as_read(self, table: pa.Table) -> pa.Table | None:
        """Select the columns that are read; None where text is a time here, which it is not in `tables`."""
        table = table.select([name for name in table.column_names if self._columns is None or name in self._columns])
        same = all(field.type == _kind_read(field.type) for field in table.schema)
        return table if same else None

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, about 4 MiB of text at a time."""
        for block in file_blocks(file):
            yield self._parse(file, block, schema)

    def piece(self, file: SourceFile, schema: pa.Schema, batch_rows: int, first_row: int, end: int) -> Iterator[pa.Table]:
        """Begin at the last cut before the row."""
        cut = last_cut(file, first_row)
        with open_span(file.uri, cut.at, file.size_bytes) as stream:
            tables = (self._parse(file, block, schema) for block in line_blocks(file, stream, b"", cut.line, cut.at))
            yield from rows_between(tables, cut.row, first_row, end)

    def lines(self, file: SourceFile, rows: Collection[int]) -> dict[int, int]:
        """See `Reader.lines`."""
        found: dict[int, int] = {}
        first, last = 0, max(rows, default=-1)
        for block in file_blocks(file):
            wanted = [row - first for row in rows if first <= row < first + block.rows]
            if wanted:
                numbers = [number for number, _ in block.numbered_lines()]
                found |= {first + row: numbers[row] for row in wanted}
            first += block.rows
            if first > last:
                break
        return found

    def _parse(self, file: SourceFile, block: Block, schema: pa.Schema | None) -> pa.Table:
        """Read a block as `schema`, or with the types it shows where `schema` is None."""
        given = schema if schema is not None else pa.schema(list(self._types.items()))
        try:
            table = _parse_block(block.text, given, infer=schema is None)
            # Pyarrow takes `{} {}` on a line, and one object over several lines, which would make row and line differ.
            if table.num_columns and table.num_rows != block.rows:
                raise pa.ArrowInvalid(f"{table.num_rows} objects on {block.rows} lines")
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            table = self._parse_slowly(file, block, given, infer=schema is None)
        self._refuse_rounded(file, block, table)
        return table if schema is None else table.select(schema.names)

    def _refuse_rounded(self, file: SourceFile, block: Block, table: pa.Table) -> None:
        """Pyarrow makes a float of an integer from 2**63 on, beside a fraction or for `data.types`, whatever is lost."""
        wanted = [field for field in table.schema if self._columns is None or field.name in self._columns]
        floats = [field for field in wanted if _narrowest(field.type) and _is_large(table.column(field.name))]
        if not floats or not has_long_integer(block.text, min(_narrowest(field.type) for field in floats)):
            return
        for number, text in block.numbered_lines():
            item = json.loads(text, parse_float=_Fraction)
            for field in floats:
                rounded = next(_rounded(item.get(field.name), field.type), None)
                if rounded is not None:
                    raise DataError(
                        f"{file.uri}, line {number}: column {field.name!r} holds {rounded}, which no {field.type} holds "
                        "without rounding",
                        next_step=f"set data.types: {{{in_yaml(field.name)}: string}} (or "
                        f"{'uint64 where no value has a fraction' if _narrowest(field.type) == 64 else 'double'})",
                    )

    def _parse_slowly(self, file: SourceFile, block: Block, given: pa.Schema, *, infer: bool) -> pa.Table:
        """Parse a block where a column of `data.types` has several kinds of values, or a column that is not read is untidy."""
        wanted = self._columns if infer else given.names
        typed: dict[str, list[Any]] = {name: [] for name in given.names if name in self._types}
        objects: list[tuple[int, dict[str, Any]]] = []
        for number, item in _objects(file, block):
            for name, values in typed.items():
                values.append(item.pop(name, None))
            objects.append((number, item if wanted is None else {name: item[name] for name in wanted if name in item}))
        others = pa.schema([field for field in given if field.name not in typed])
        text = b"".join(json.dumps(item).encode() + b"\n" for _, item in objects)
        try:
            table = _parse_block(text, others, infer=infer)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise _clash(file, objects, error) from error
        columns = dict(zip(table.column_names, table.columns, strict=True))
        for name, values in typed.items():
            columns[name] = _column(file, name, values, [number for number, _ in objects], self._types[name])
        return pa.table(columns)


def _parse_block(block: bytes, given: pa.Schema, *, infer: bool) -> pa.Table:
    parsed = pa.schema([pa.field(field.name, _parsed_as(field.type)) for field in given])
    options = arrow_json.ParseOptions(
        explicit_schema=parsed if len(given) else None, unexpected_field_behavior="infer" if infer else "ignore"
    )
    # One parser block for the whole: else a line longer than 1 MiB is refused, and types may differ between parser blocks.
    reading = arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    table = arrow_json.read_json(io.BytesIO(block), read_options=reading, parse_options=options)
    kinds = {field.name: field.type for field in given}
    other = [index for index, field in enumerate(table.schema) if kinds.get(field.name, field.type) != field.type]
    if not other:
        return table
    columns = table.columns
    for index in other:
        columns[index] = cast_array(columns[index].chunk(0), kinds[table.field(index).name])  # a chunked one gets a mask
    return pa.table(columns, names=table.column_names)


@functools.cache  # wide tables have thousands of columns of one type
def _parsed_as(kind: pa.DataType) -> pa.DataType:
    """Return the type with plain lists, the only ones of pyarrow's parser, and text for times, of which it changes zones."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _parsed_as(field.type)) for field in kind])
    if is_list(kind):
        return pa.list_(_parsed_as(kind.value_type))
    return pa.string() if pa.types.is_temporal(kind) else kind


@functools.cache
def _narrowest(kind: pa.DataType) -> int:
    if pa.types.is_nested(kind):
        return min(filter(None, (_narrowest(kind.field(index).type) for index in range(kind.num_fields))), default=0)
    return int(kind.bit_width) if pa.types.is_floating(kind) else 0


def _is_large(column: pa.ChunkedArray) -> bool:
    """Whether there are floats of more digits than are always exact."""
    kind = column.type
    if is_list(kind):
        return _is_large(pc.list_flatten(column))
    if pa.types.is_struct(kind):
        return any(_is_large(pc.struct_field(column, index)) for index in range(kind.num_fields))
    largest = pc.max(pc.abs(pc.cast(column, pa.float64()))).as_py() if _narrowest(kind) else None
    return largest is not None and largest >= 10 ** (_narrowest(kind) // 4 - 1)


def _rounded(value: Any, kind: pa.DataType) -> Iterator[int]:
    """Yield the integers in `value` that a float of the column's type would round."""
    if isinstance(value, list) and is_list(kind):
        for item in value:
            yield from _rounded(item, kind.value_type)
    elif isinstance(value, dict) and pa.types.is_struct(kind):
        for field in kind:
            yield from _rounded(value.get(field.name), field.type)
    elif pa.types.is_floating(kind):
        if isinstance(value, _Fraction) and value.text.rstrip("0").endswith("."):
            value = int(value.text.partition(".")[0])
        if isinstance(value, int) and not fits_double(value, kind.bit_width):
            yield value


def _column(file: SourceFile, name: str, values: list[Any], lines: list[int], kind: pa.DataType) -> pa.Array:
    """Values of several kinds as one type: by way of text, where some of them are text or text is wanted."""
    kinds = {*map(type, values)} - {type(None)}
    by_text = is_text(kind) or pa.types.is_decimal(kind) or str in kinds or (len(kinds) > 1 and not kinds & {list, dict})
    given = [_text(value) if by_text and value is not None else value for value in values]

    def read(rows: pa.Array, kind: pa.DataType) -> pa.Array:
        return cast_array(cast_array(pa.array([given[row] for row in rows.to_pylist()]), _parsed_as(kind)), kind)

    rows = pa.array(range(len(values)))
    try:
        return read(rows, kind)
    except pa.ArrowException as error:
        bad = first_bad_row(rows, kind, read)
        raise DataError(
            f"{file.uri}, line {lines[bad]}: column {name!r} holds {shorten(values[bad])}, which does not read as {kind}",
            next_step=f"repair the line, or set data.types: {{{in_yaml(name)}: string}}",
        ) from error


class _Fraction(float):
    """A number with its text: 1.10 stays that where text or a decimal is wanted."""

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str


def _text(value: Any) -> str:
    return value if isinstance(value, str) else value.text if isinstance(value, _Fraction) else json.dumps(value)


def _objects(file: SourceFile, block: Block) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in block.numbered_lines():
        try:
            value = json.loads(text, parse_float=_Fraction, object_pairs_hook=unique_keys)
        except ValueError as error:
            raise DataError(
                f"{file.uri}, line {number}: not a JSON object ({error}): {shorten(text.decode())}",
                next_step="repair the line; every line must hold one whole object (jq -c . FILE > NEW.jsonl writes such lines)",
            ) from error
        if not isinstance(value, dict):
            raise DataError(f"{file.uri}, line {number}: holds {shorten(value)}, not an object {{...}}")
        yield number, value


def _clash(file: SourceFile, objects: list[tuple[int, dict[str, Any]]], error: Exception) -> DataError:
    """Name line and column of what pyarrow cannot put into one type."""
    text = " ".join(str(error).split()).removeprefix("JSON parse error: ")
    row = re.search(r" in row ([0-9]+)$", text)
    if row is None:
        return DataError(f"{file.uri}, lines {objects[0][0]} to {objects[-1][0]}: {text}", next_step="repair the lines")
    line, item = objects[int(row[1])]
    what = text[: row.start()]
    mixed = re.match(r"Column\(/(.*)\) changed from ", what)
    name = "" if mixed is None else next((name for name in item if f"{mixed[1]}/".startswith(f"{name}/")), "")
    if mixed is None or not name:
        return DataError(
            f"{file.uri}, line {line}: {what}", next_step="repair the line, or leave the column out: data.columns: [NAME, ...]"
        )
    return DataError(
        f"{file.uri}, line {line}: column {name!r} {what.partition(') ')[2]}: it holds {shorten(item[name])}",
        next_step=f"repair the line, or set data.types: {{{in_yaml(name)}: string}}",
    )


@functools.cache
def _kind_read(kind: pa.DataType) -> pa.DataType:
    """Return the canonical type that a column of the parser's is read as."""
    return _without_times(canonical_type(kind))


def _without_times(kind: pa.DataType) -> pa.DataType:
    """Pyarrow takes text that looks like a time for one, so that a file's type would depend on which texts it holds."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _without_times(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_without_times(kind.value_type))
    return kind
