"""Which imputers, masks and casts had nothing to do? Often a sign that what is missing is written as a word, such as `?`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.materialize.profile import ColumnProfile, Profile
from penstock.ingest.preprocess.transform_spec import TransformSpec
from penstock.ingest.read.snapshot import SourceSnapshot

__all__ = ["idle_transforms"]

_WORDS = frozenset({"", "?", "-", "--", ".", "*", "na", "n/a", "none", "null", "nan", "unknown", "missing"})
"""Lower-case texts that people write where a value is missing."""


def idle_transforms(transforms: Sequence[TransformSpec], snapshot: SourceSnapshot, profile: Profile) -> list[str]:
    """A sentence for each transform that found nothing to do in its source columns; columns that others make are left out."""
    types = {column.name: parse_type(column.type) for column in snapshot.columns}
    whole: dict[str, ColumnProfile] = {}
    for columns in profile.columns.values():
        for name, column in columns.items():
            whole[name] = whole.get(name, ColumnProfile()).plus(column)
    found = []
    for entry in transforms:
        if entry.transform.makes_columns:
            break
        options = entry.transform.options
        if entry.kind == "cast":
            same = [name for name, text in options.items() if types.get(name) == parse_type(text)]
            found += [f"cast has nothing to do: column {name!r} is {types[name]} already" for name in same]
        elif entry.kind in ("imputer", "null_mask") and options.columns != "*":
            full = [name for name in options.columns if name in whole and not _missing(whole[name])]
            found += [f"{entry.kind} has nothing to do: column {name!r} lacks no value{_words(whole[name])}" for name in full]
    return found


def _missing(column: ColumnProfile) -> int:
    """Rows without a value; NaN is none."""
    return column.nulls if column.values is not None or not column.count else column.rows - column.count


def _words(column: ColumnProfile) -> str:
    words = {value: rows for value, rows in (column.values or {}).items() if value.strip().lower() in _WORDS}
    said = ", ".join(f"{word!r} is in {rows:,} row{'s' if rows != 1 else ''}" for word, rows in words.items())
    return f", but {said}, and counts as a value like any other" if words else ""
