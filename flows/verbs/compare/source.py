"""How does the user's code differ between two runs? A diff of the definitions that each of them reached."""

from __future__ import annotations

import difflib
from typing import Any

from penstock.tasks.records.changes import Before, Changes

__all__ = ["code_diffs"]


def code_diffs(before: Before, after: Before, found: Changes) -> list[dict[str, Any]]:
    """For each changed file: the definitions that do something else, and a unified diff of what is reached of it."""
    diffs: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for change in found.code:
        sides = [side.definitions(change.targets, change.file) for side in (before, after)]
        names = list(dict.fromkeys([*sides[0], *sides[1]]))
        lines = [line for name in names for line in _diff(name, *(side.get(name, "") for side in sides))]
        entry = {"file": change.file, "names": list(change.names), "diff": lines}
        diffs.setdefault((change.file, tuple(lines)), entry)
    return list(diffs.values())


def _diff(name: str, was: str, now: str) -> list[str]:
    if was == now:
        return []
    _, _, *lines = difflib.unified_diff(was.splitlines(), now.splitlines(), lineterm="", n=3)
    return [f"@@ {name} @@", *(line for line in lines if not line.startswith("@@"))]
