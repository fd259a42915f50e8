"""Which split does a row belong to? A hash of the row (or of its group) decides: no other row, no added file ever moves it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.formats.registry import format_of
from penstock.ingest.read.row_hash import hash_columns, unit_interval
from penstock.ingest.schema import SPLITS, Split
from penstock.ingest.spec import DataSpec, SplitRule, check_split_rules, split_rules

__all__ = ["split_codes"]


_VALIDATION, _TEST = (np.uint8(SPLITS.index(split)) for split in ("validation", "test"))


def split_codes(data: DataSpec, table: pa.Table, location: Split) -> np.ndarray:
    """Say where each row of `table` (rows found under `location`) goes: uint8 [rows], index into SPLITS.

    Only rows under `data.train` are split. Test rows are carved out first: with u the row's hash in [0, 1), u < f_test is test
    and f_test <= u < f_test + f_validation is validation. Where the two rules hash different columns, validation takes its
    share of what test has left, by its own hash.

    Raises:
        SpecError: the fractions add up to 1 or more.
        DataError: the column that groups rows is not there, has nulls, or cannot be hashed.
    """
    check_split_rules(data)
    codes = np.full(table.num_rows, SPLITS.index(location), np.uint8)
    rules = split_rules(data)
    if location != "train" or not rules or not table.num_rows:
        return codes
    test, validation = rules.get("test"), rules.get("validation")
    below = test.fraction if test else 0.0
    if validation:
        u = _positions(data, table, "validation", validation)
        if test is None or test.by == validation.by:
            codes[(u >= below) & (u < below + validation.fraction)] = _VALIDATION
        else:
            codes[u < validation.fraction / (1.0 - below)] = _VALIDATION
    if test:
        codes[_positions(data, table, "test", test) < below] = _TEST
    return codes


def _positions(data: DataSpec, table: pa.Table, split: str, rule: SplitRule) -> np.ndarray:
    names = table.column_names
    if rule.by == "row":
        identity = [name for name in format_of(data).identity if name in names] or names
    else:
        identity = [_group_column(table, split, rule.by)]
    try:
        return unit_interval(hash_columns(table, identity))
    except TypeError as error:
        raise DataError(f"data.{split}: {error}", next_step=f"set data.{split}.by to another column, or data.types") from error


def _group_column(table: pa.Table, split: str, name: str) -> str:
    if name not in table.column_names:
        raise DataError(
            f"data.{split}.by: there is no column {name!r}; the rows have {', '.join(table.column_names)}",
            next_step=f"correct data.{split}.by, or add the column to data.columns",
        )
    nulls = table.column(name).null_count
    if nulls:
        raise DataError(
            f"data.{split}.by: column {name!r} is null in {nulls} of the next {table.num_rows} rows, which belong to no group",
            next_step=f"fill the nulls in the source, or split by another column (data.{split}.by: row)",
        )
    return name
