"""How do the data of two runs differ? Files, rows, classes and source columns, by what is on record of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.ingest.materialize.profile import ColumnProfile, Profile
from penstock.ingest.schema import SPLITS
from penstock.tasks.records.changes import FileChange
from penstock.tasks.records.data import RunData

__all__ = ["compare_data"]

_NOTABLE_SHIFT = 0.1
"""A mean that moved by a smaller share of the standard deviation does not count as drift, however significant it is."""

_NOTABLE_SHARE = 0.05
"""The same of shares: of nulls, of a text's values."""


def compare_data(before: RunData, after: RunData, files: tuple[FileChange, ...]) -> dict[str, Any]:
    """Compare files, rows and classes by split, and columns, as JSON."""
    return {
        "files": [_file(change, before, after) for change in files],
        "rows": [
            {"split": split, "before": was, "after": now}
            for split in SPLITS
            if (was := _rows(before, split)) + (now := _rows(after, split))
        ],
        "classes": _classes(before.class_rows(), after.class_rows()),
        "columns": _columns(before.profile, after.profile),
    }


def _file(change: FileChange, before: RunData, after: RunData) -> dict[str, Any]:
    was, now = before.files.get(change.name, {}), after.files.get(change.name, {})
    found = {"name": change.name, "what": change.what, "rows_before": was.get("rows"), "rows": now.get("rows")}
    side = before if change.what == "gone" else after
    return {**found, "classes": side.file_classes().get(change.name, {})}


def _rows(data: RunData, split: Any) -> int:
    return data.manifest.rows.get(split, 0) if data.manifest is not None else 0


def _classes(before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    found = []
    for split in SPLITS:
        was, now = before.get(split, {}), after.get(split, {})
        for name in dict.fromkeys([*was, *now]):
            shares = [rows.get(name, 0) / max(1, sum(rows.values())) for rows in (was, now)]
            counts = {"before": was.get(name, 0), "after": now.get(name, 0)}
            found.append(
                {"split": split, "class": name, **counts, "share_before": shares[0], "share_after": shares[1]}
                | {"drifted": _moved(shares[0], shares[1], sum(was.values()), sum(now.values()))}
            )
    return found


def _columns(before: Profile, after: Profile) -> list[dict[str, Any]]:
    """Compare every column of the train split; those that moved most come first."""
    was, now = before.columns.get("train", {}), after.columns.get("train", {})
    found = [_column(name, was.get(name), now.get(name)) for name in dict.fromkeys([*was, *now])]
    return sorted(found, key=lambda entry: (not entry["drifted"], -abs(entry["distance"] or 0)))


def _column(name: str, was: ColumnProfile | None, now: ColumnProfile | None) -> dict[str, Any]:
    if was is None or now is None:
        return {"column": name, "kind": "added" if was is None else "gone", "distance": None, "drifted": True, "summary": ""}
    nulls = [side.nulls / max(1, side.rows) for side in (was, now)]
    drifted = _moved(nulls[0], nulls[1], was.rows, now.rows)
    if was.count and now.count:
        shift, spread = now.mean - was.mean, was.std or now.std
        distance = shift / spread if spread else 0.0
        drifted |= abs(distance) > max(_NOTABLE_SHIFT, 3 * math.sqrt(1 / was.count + 1 / now.count))
        summary = f"mean {was.mean:.4g} -> {now.mean:.4g} ({distance:+.2f} of its standard deviation)"
    else:
        shares = [{value: count / max(1, side.rows) for value, count in (side.values or {}).items()} for side in (was, now)]
        shift_of = {value: shares[1].get(value, 0.0) - shares[0].get(value, 0.0) for value in {*shares[0], *shares[1]}}
        distance = sum(map(abs, shift_of.values())) / 2
        most = max(sorted(shift_of), key=lambda value: abs(shift_of[value]), default=None)
        drifted |= any(_moved(shares[0].get(v, 0.0), shares[1].get(v, 0.0), was.rows, now.rows) for v in shift_of)
        summary = "" if most is None else f"{most!r} {shares[0].get(most, 0.0):.1%} -> {shares[1].get(most, 0.0):.1%}"
    if abs(nulls[0] - nulls[1]) > 0:
        summary = ", ".join(filter(None, [summary, f"nulls {nulls[0]:.1%} -> {nulls[1]:.1%}"]))
    kind = "numbers" if was.count and now.count else "text"
    return {"column": name, "kind": kind, "distance": distance, "drifted": bool(drifted), "summary": summary}


def _moved(was: float, now: float, rows_before: int, rows_after: int) -> bool:
    """Return whether a share changed significantly, and by a notable amount."""
    if not rows_before or not rows_after:
        return False
    pooled = (was * rows_before + now * rows_after) / (rows_before + rows_after)
    error = math.sqrt(max(pooled * (1 - pooled), 1e-9) * (1 / rows_before + 1 / rows_after))
    return abs(now - was) > max(_NOTABLE_SHARE, 3 * error)
