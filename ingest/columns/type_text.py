"""How is an Arrow type written in a snapshot or a pipeline file? `type_text` and `parse_type` are inverses of each other.

The text equals pyarrow's own where pyarrow can read it back; nested types, which pyarrow only prints, are parsed here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence

import pyarrow as pa

from penstock.messages import shorten

__all__ = ["has_type_text", "parse_type", "type_text", "value_text"]

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


def value_text(values: pa.ChunkedArray | pa.Array, row: int) -> str:
    """Write the value of a row for a message, also a time that Python has none for, as those after the year 9999."""
    try:
        return shorten(values[row].as_py())
    except (OverflowError, ValueError):
        return str(pa.array([values[row]], values.type).to_string(skip_new_lines=True)).removeprefix("[").removesuffix("]")


def type_text(kind: pa.DataType) -> str:
    """Write a canonical type as text that `parse_type` reads back."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return f"fixed_shape_tensor<{type_text(kind.value_type)}>{list(kind.shape)}".replace(" ", "")
    if pa.types.is_struct(kind):
        names = [field.name if _PLAIN_NAME.fullmatch(field.name) else json.dumps(field.name) for field in kind]
        return f"struct<{', '.join(f'{name}: {type_text(field.type)}' for name, field in zip(names, kind, strict=True))}>"
    if pa.types.is_map(kind):
        return f"map<{type_text(kind.key_type)}, {type_text(kind.item_type)}>"
    if pa.types.is_fixed_size_list(kind):
        return f"fixed_size_list<{type_text(kind.value_type)}>[{kind.list_size}]"
    if pa.types.is_large_list(kind):
        return f"large_list<{type_text(kind.value_type)}>"
    if pa.types.is_list(kind):
        return f"list<{type_text(kind.value_type)}>"
    return str(kind)


def has_type_text(kind: pa.DataType) -> bool:
    """Whether columns of this canonical type can be read; unions and views of lists cannot."""
    try:
        return parse_type(type_text(kind)) == kind
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)  # wide tables have thousands of columns of one type
def parse_type(text: str) -> pa.DataType:
    """Read a type: Arrow's own names (`int64`, `timestamp[s]`, `string`) and the nested forms that `type_text` writes.

    Raises:
        ValueError: the text is not a type.
    """
    kind, rest = _parse(text.strip())
    if rest.strip():
        raise ValueError(f"{text!r} is not an Arrow type: {rest!r} is left over")
    return kind


def _parse(text: str) -> tuple[pa.DataType, str]:
    match = re.match(r"(fixed_size_list|fixed_shape_tensor|large_list|list|map|struct)<", text)
    if not match:
        return _parse_scalar(text)
    name, rest = match[1], text[match.end() :]
    if name == "struct":
        fields, rest = _parse_fields(rest)
        return pa.struct(fields), rest
    inner, rest = _parse(re.sub(r"^\s*(item|element):\s*", "", rest))
    if name == "map":
        value, rest = _parse(_expect(rest, ",").lstrip())
        return pa.map_(inner, value), _expect(rest, ">")
    rest = _expect(rest, ">")
    if name == "list":
        return pa.list_(inner), rest
    if name == "large_list":
        return pa.large_list(inner), rest
    size = re.match(r"\[([\d, ]*)\]", rest)
    if not size:
        raise ValueError(f"{name} needs its size in brackets, as in {name}<uint8>[784]")
    shape: Sequence[int] = [int(part) for part in size[1].split(",") if part.strip()]
    rest = rest[size.end() :]
    return (pa.list_(inner, shape[0]) if name == "fixed_size_list" else pa.fixed_shape_tensor(inner, shape)), rest


def _parse_fields(text: str) -> tuple[list[pa.Field], str]:
    fields: list[pa.Field] = []
    rest = text.lstrip()
    while not rest.startswith(">"):
        if fields:
            rest = _expect(rest, ",").lstrip()
        if rest.startswith('"'):
            name, end = json.JSONDecoder().raw_decode(rest)
        else:
            match = _PLAIN_NAME.match(rest)
            if not match:
                raise ValueError(f"a field name is expected at {rest!r}")
            name, end = match[0], match.end()
        kind, rest = _parse(_expect(rest[end:], ":").lstrip())
        fields.append(pa.field(name, kind))
    return fields, rest[1:]


def _expect(text: str, sign: str) -> str:
    if not text.lstrip().startswith(sign):
        raise ValueError(f"{sign!r} is expected at {text!r}")
    return text.lstrip()[1:]


def _parse_scalar(text: str) -> tuple[pa.DataType, str]:
    match = re.match(r"[a-z_0-9]+(\[[^\]]*\]|\([^)]*\))?", text)
    if not match:
        raise ValueError(f"a type is expected at {text!r}")
    name, rest = match[0], text[match.end() :]
    if zoned := re.fullmatch(r"timestamp\[(s|ms|us|ns), tz=(.+)\]", name):
        return pa.timestamp(zoned[1], zoned[2]), rest
    if decimal := re.fullmatch(r"decimal(32|64|128|256)\((\d+), ?(-?\d+)\)", name):
        return getattr(pa, f"decimal{decimal[1]}")(int(decimal[2]), int(decimal[3])), rest
    if sized := re.fullmatch(r"fixed_size_binary\[(\d+)\]", name):
        return pa.binary(int(sized[1])), rest
    aliases = {"halffloat": "float16", "date32[day]": "date32", "date64[ms]": "date64", "text": "string", "int": "int64"}
    try:
        return pa.type_for_alias(aliases.get(name, name)), rest
    except ValueError as error:
        raise ValueError(
            f"{name!r} is not an Arrow type; examples: string, int64, float64, bool, timestamp[s], date32"
        ) from error
