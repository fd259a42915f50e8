"""Which split does a row belong to? A hash of the row (or of its group) decides, or its time: no added file ever moves it."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.columns.fixed_shape import is_number, is_text, single_chunk
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import format_of
from penstock.ingest.read.row_hash import hash_columns, unit_interval
from penstock.ingest.schema import SPLITS
from penstock.ingest.spec import PATH, DataSpec, SplitRule, check_split_rules, split_rules
from penstock.messages import in_yaml

__all__ = ["Deal", "class_hashes", "deals", "hash_positions", "row_hashes", "split_codes"]

_TRAIN, _VALIDATION, _TEST = (SPLITS.index(split) for split in ("train", "validation", "test"))


def split_codes(data: DataSpec, table: pa.Table, files: Sequence[SourceFile]) -> np.ndarray:
    """Return the split of each row of `table`: int32 [rows], index into `data.locations`.

    Only rows under `data.train` are split. Test rows are carved out first: with u the row's hash in [0, 1), u < f_test is test
    and f_test <= u < f_test + f_validation is validation. If the two rules hash different columns, validation has its own hash,
    and its share is still of all rows; if test goes by time, its share is of the rows that test leaves. With `stratify` the
    ends of these ranges are those of the row's file and class (`SourceFile.strata`).

    Args:
        files: of one location: the file of all rows, or the file of each (`RowBatch.files`).

    Raises:
        SpecError: the fractions add up to 1 or more.
        DataError: a column that a rule goes by is not there, has nulls or another type than the rule's, or cannot be
            hashed.
    """
    check_split_rules(data)
    location = files[0].location
    codes = np.full(table.num_rows, data.locations.index(location), np.int32)
    rules = split_rules(data)
    if location != "train" or not rules or not table.num_rows:
        return codes
    for split in ("validation", "test"):  # what both hold out is test
        if split in rules and rules[split].is_by_time:
            codes[_in_time(table, files, split, rules[split])] = SPLITS.index(split)
        for deal in deals(data):
            if deal.split == split:
                held = np.array(deal.codes, np.int32)[_parts(data, deal, table, files)]
                codes = np.where(held == _TRAIN, codes, held)
    return codes


class Deal(NamedTuple):
    """How rows are dealt to splits by a hash: the range [0, 1) of hashes in parts."""

    split: str
    """Whose rule it is."""
    rule: SplitRule
    ends: tuple[float, ...]
    """Where each part but the last ends, rising."""
    codes: tuple[int, ...]
    """Split of each part, index into SPLITS; one more than `ends`."""


def deals(data: DataSpec) -> list[Deal]:
    """Return the deals of the rules that go by hashes: one for both splits where they hash the same."""
    found: list[Deal] = []
    hashed = {split: rule for split, rule in split_rules(data).items() if not rule.is_by_time}
    test, validation = hashed.get("test"), hashed.get("validation")
    below = 0.0 if test is None or test.fraction is None else test.fraction
    together = test is not None and validation is not None and test.by == validation.by
    if validation is not None:
        ends, codes, start = ([below], [_TEST], below) if together else ([], [], 0.0)
        share = validation.fraction or 0.0
        ends.append(start + (share if together else share / (1.0 - below)))
        found.append(Deal("validation", validation, tuple(ends), (*codes, _VALIDATION, _TRAIN)))
    if test is not None and not together:
        found.append(Deal("test", test, (below,), (_TEST, _TRAIN)))
    return found


def _parts(data: DataSpec, deal: Deal, table: pa.Table, files: Sequence[SourceFile]) -> np.ndarray:
    """Return the part of the deal that each row is in: int64 [rows]."""
    u = hash_positions(data, table, files, deal)
    strata = files[0].strata if len(files) == 1 else None
    if deal.rule.stratify is None or strata is None:  # or each file is one row
        return np.searchsorted(deal.ends, u, side="right")
    classes, parts = class_hashes(data, table, deal.rule.stratify), np.zeros(len(u), np.int64)
    for value in np.unique(classes).tolist():
        rows = classes == value
        parts[rows] = np.searchsorted(strata[str(value)], u[rows], side="left")  # an end is the hash of its last row
    return parts


def class_hashes(data: DataSpec, table: pa.Table, column: str) -> np.ndarray:
    """Hash the values of a column of classes: uint64 [rows]. Raises as `hash_columns`."""
    return _hashes(data, table.select([column]))


def _in_time(table: pa.Table, files: Sequence[SourceFile], split: str, rule: SplitRule) -> np.ndarray:
    """Return which rows are at or after `after` and before `before`: bool [rows]."""
    (name,) = rule.columns
    column = _group(table, files, split, name)
    column = single_chunk(column) if isinstance(column, pa.ChunkedArray) else column
    limit = rule.after if rule.after is not None else rule.before
    times = pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
    if times != isinstance(limit, dt.datetime) or not (times or is_number(column.type)):
        wanted = "times" if isinstance(limit, dt.datetime) else "numbers"
        raise DataError(
            f"data.{split}: after and before are {wanted}, and column {name!r} is {column.type}",
            next_step=f"set its type (data.types: {{{in_yaml(name)}: {'timestamp[us]' if wanted == 'times' else 'float64'}}}), "
            f"or correct data.{split}",
        )
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("s" if pa.types.is_date32(column.type) else "ms"))
    values = (column.cast(pa.int64()) if times else column).to_numpy(zero_copy_only=False)
    values = values.astype(np.float64) if values.dtype.kind == "f" else values  # a limit may be beyond float16
    if np.isnan(values).any() if values.dtype.kind == "f" else False:
        raise DataError(f"data.{split}.by: {name!r} holds NaN in {files[0].uri}", next_step="correct the rows in the source")
    inside = np.ones(len(values), np.bool_)
    if rule.after is not None:
        inside &= values >= _on_scale(rule.after, column.type, values.dtype)
    if rule.before is not None:
        inside &= values < _on_scale(rule.before, column.type, values.dtype)
    return inside


def _on_scale(moment: dt.datetime | float, kind: pa.DataType, dtype: np.dtype) -> float:
    """Return the smallest value of the column, as a number, that is not before the moment. Exact: no floats for times."""
    if not isinstance(moment, dt.datetime):
        return moment if dtype.kind == "f" else math.ceil(moment)
    utc = moment.replace(tzinfo=dt.UTC) if moment.tzinfo is None else moment
    microseconds = (utc - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    per_second = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[kind.unit]
    return -(-microseconds * per_second // 1_000_000)


def row_hashes(data: DataSpec, table: pa.Table) -> np.ndarray:
    """Hash source rows by the columns kept for preparation, as `by: row` does: uint64 [rows]. Raises as `hash_columns`."""
    return _hashes(data, _whole_rows(data, table))


def _whole_rows(data: DataSpec, table: pa.Table) -> pa.Table:
    names, form = table.column_names if data.columns is None else data.columns, format_of(data)
    hashed = set(form.identity) or {*names}.difference(form.not_features)
    return table.select([name for name in names if name in hashed] or names)


def hash_positions(data: DataSpec, table: pa.Table, files: Sequence[SourceFile], deal: Deal) -> np.ndarray:
    """Return the hashes that a deal goes by: float64 [rows] in [0, 1).

    Raises:
        DataError: as `split_codes`.
    """
    split, rule = deal.split, deal.rule
    if rule.columns:
        hashed = pa.table({name: _group(table, files, split, name) for name in rule.columns})
    else:
        hashed = _whole_rows(data, table)
    return unit_interval(_hashes(data, hashed))


def _hashes(data: DataSpec, hashed: pa.Table) -> np.ndarray:
    words = format_of(data).null_words
    for index, field in enumerate(hashed.schema):
        if words is not None and is_text(field.type):
            absent = pc.is_in(hashed.column(index), words)
            hashed = hashed.set_column(index, field.name, pc.if_else(absent, pa.scalar(None, field.type), hashed.column(index)))
    return hash_columns(hashed, hashed.column_names)


def _group(table: pa.Table, files: Sequence[SourceFile], split: str, name: str) -> pa.ChunkedArray | pa.Array:
    """Return the groups of the rows: a column, or the paths of their files."""
    if name in table.column_names:
        values = table.column(name)
    elif name == PATH:
        paths = [file.name for file in files]
        values = pa.array(paths) if len(paths) > 1 else pa.repeat(paths[0], table.num_rows)
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
    return values
