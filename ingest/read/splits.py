"""Which split does a row belong to? A hash of the row (or of its group) decides: no other row, no added file ever moves it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_text
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import format_of
from penstock.ingest.read.row_hash import hash_columns, unit_interval
from penstock.ingest.schema import SPLITS
from penstock.ingest.spec import PATH, DataSpec, SplitRule, check_split_rules, split_rules
from penstock.messages import shorten

__all__ = ["row_hashes", "split_codes"]


_VALIDATION, _TEST = (np.uint8(SPLITS.index(split)) for split in ("validation", "test"))


def split_codes(data: DataSpec, table: pa.Table, files: Sequence[SourceFile]) -> np.ndarray:
    """Say where each row of `table` goes: uint8 [rows], index into SPLITS.

    Only rows under `data.train` are split. Test rows are carved out first: with u the row's hash in [0, 1), u < f_test is test
    and f_test <= u < f_test + f_validation is validation. Where the two rules hash different columns, validation takes its
    share of what test has left, by its own hash.

    Args:
        files: of one location: the file of all rows, or the file of each (`RowBatch.files`).

    Raises:
        SpecError: the fractions add up to 1 or more.
        DataError: a column that groups rows is not there, has nulls or no match of the pattern, or cannot be hashed.
    """
    check_split_rules(data)
    location = files[0].location
    codes = np.full(table.num_rows, SPLITS.index(location), np.uint8)
    rules = split_rules(data)
    if location != "train" or not rules or not table.num_rows:
        return codes
    test, validation = rules.get("test"), rules.get("validation")
    below = test.fraction if test else 0.0
    if validation:
        u = _positions(data, table, files, "validation", validation)
        if test is None or (test.by, test.pattern) == (validation.by, validation.pattern):
            codes[(u >= below) & (u < below + validation.fraction)] = _VALIDATION
        else:
            codes[u < validation.fraction / (1.0 - below)] = _VALIDATION
    if test:
        codes[_positions(data, table, files, "test", test) < below] = _TEST
    return codes


def row_hashes(data: DataSpec, table: pa.Table) -> np.ndarray:
    """Hash the rows by what is prepared of them, as rules by whole rows do: uint64 [rows].

    Raises:
        DataError: a column's type cannot be hashed.
    """
    try:
        return _hashes(data, _whole_rows(data, table))
    except TypeError as error:
        raise DataError(
            f"{error}, so rows that are in two splits cannot be found",
            next_step="leave it out of data.columns, or set data.types",
        ) from error


def _whole_rows(data: DataSpec, table: pa.Table) -> pa.Table:
    names = table.column_names if data.columns is None else data.columns
    return table.select([name for name in format_of(data).identity if name in names] or names)


def _positions(data: DataSpec, table: pa.Table, files: Sequence[SourceFile], split: str, rule: SplitRule) -> np.ndarray:
    if rule.columns:
        hashed = pa.table({name: _group(table, files, split, name, rule.pattern) for name in rule.columns})
    else:
        hashed = _whole_rows(data, table)
    try:
        return unit_interval(_hashes(data, hashed))
    except TypeError as error:
        raise DataError(f"data.{split}: {error}", next_step=f"set data.{split}.by to another column, or data.types") from error


def _hashes(data: DataSpec, hashed: pa.Table) -> np.ndarray:
    words = format_of(data).null_words
    for index, field in enumerate(hashed.schema):
        if words is not None and is_text(field.type):
            absent = pc.is_in(hashed.column(index), words)
            hashed = hashed.set_column(index, field.name, pc.if_else(absent, pa.scalar(None, field.type), hashed.column(index)))
    return hash_columns(hashed, hashed.column_names)


def _group(
    table: pa.Table, files: Sequence[SourceFile], split: str, name: str, pattern: str | None
) -> pa.ChunkedArray | pa.Array:
    """What the rows are grouped by: a column, or the paths of their files, or what the pattern finds in it."""
    if name in table.column_names:
        values = table.column(name)
    elif name == PATH:
        values = pa.array([file.name for file in files]) if len(files) > 1 else pa.repeat(files[0].name, table.num_rows)
    else:
        raise DataError(
            f"data.{split}.by: there is no column {name!r}; the rows have {', '.join(table.column_names)}",
            next_step=f"correct data.{split}.by",
        )
    if values.null_count:
        raise DataError(
            f"data.{split}.by: column {name!r} is null in {values.null_count} of {table.num_rows} rows of {files[0].uri}, "
            "which belong to no group",
            next_step=f"fill the nulls in the source, or split by another column (data.{split}.by: row)",
        )
    return values if pattern is None else _found(values, split, name, pattern)


def _found(values: pa.ChunkedArray | pa.Array, split: str, name: str, pattern: str) -> pa.Array:
    if not is_text(values.type):
        raise DataError(
            f"data.{split}.pattern searches text, and column {name!r} is {values.type}",
            next_step=f"read it as text (data.types: {{{name}: string}}), or leave the pattern out",
        )
    encoded = pc.dictionary_encode(values)
    encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
    searched, found = re.compile(pattern), []
    for text in encoded.dictionary.to_pylist():
        match = searched.search(text)
        if match is None or (group := match[1] if searched.groups else match[0]) is None:
            raise DataError(
                f"data.{split}.pattern: {pattern!r} is not found in {shorten(text)} of {name!r}",
                next_step="correct the pattern so that it matches every row",
            )
        found.append(group)
    return pa.array(found, pa.string()).take(encoded.indices)
