"""What differs between two attempts (spec, code, data, versions), and which of these differences made a stage run again?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from penstock.config import Section, leaves
from penstock.tasks.records.keys import StageKey, changed_inputs, short_value
from penstock.tasks.records.ledger import Run
from penstock.tasks.stages import STAGES, StageName

__all__ = ["Change", "Changes", "changes", "why_run"]

_NAMED = 3


class Change(Section):
    """One value that differs; None where there is none."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.name}: {short_value(self.before)} -> {short_value(self.after)}"


class FileChange(Section):
    """One source file that is not on both sides, or not the same on both."""

    name: str
    """Its split and its name: `train/night2.csv`."""
    what: Literal["added", "gone", "changed"]


class Changes(Section):
    """Everything that decides a run's result and differs between two."""

    spec: tuple[Change, ...] = ()
    code: tuple[str, ...] = ()
    """Definitions and files of the user's code that do something else: `model.py:Net`, `words.txt`."""
    files: tuple[FileChange, ...] = ()
    versions: tuple[Change, ...] = ()

    def lines(self) -> list[str]:
        """Format the differences, the most important first."""
        by_kind = {what: [file.name for file in self.files if file.what == what] for what in ("added", "gone", "changed")}
        data = [f"data: {what} {_some(names)}" for what, names in by_kind.items() if names]
        code = [f"code: {_some(self.code)}"] if self.code else []
        return [*data, *code, *(f"spec: {change}" for change in self.spec), *(f"version: {c}" for c in self.versions)]


def changes(before: Run, after: Run) -> Changes:
    """Compare two runs."""
    old, new = (dict(leaves(side.spec)) for side in (before, after))
    spec = [Change(name=name, before=old.get(name), after=new.get(name)) for name in dict.fromkeys([*old, *new])]
    stages = [name for name in STAGES if name in before.keys and name in after.keys]
    pairs = [(before.keys[name].inputs, after.keys[name].inputs) for name in stages]
    versions = {
        name.removeprefix("version."): (was.get(name), now.get(name))
        for was, now in pairs
        for name in sorted({*was, *now})
        if name.startswith("version.") and was.get(name) != now.get(name)
    }
    read = [side.keys["read"].inputs.get("files", {}) if "read" in side.keys else {} for side in (before, after)]
    return Changes(
        spec=tuple(change for change in spec if change.before != change.after),
        code=tuple(dict.fromkeys(name for was, now in pairs for name in _code_changes(was, now))),
        files=tuple(_file_changes(*read)),
        versions=tuple(Change(name=name, before=was, after=now) for name, (was, now) in versions.items()),
    )


def why_run(stage: StageName, key: StageKey, before: Run | None, now: str) -> list[str]:
    """Explain why a stage of run `now` cannot reuse an output: each input that differs from the run before."""
    old = before.keys.get(stage) if before is not None else None
    if before is None or old is None:
        return ["it has never run"]
    found = [line for line in changed_inputs(old.inputs, key.inputs) if not line.startswith("code: ")]
    if not any(name.startswith("rows.") for name in old.inputs) and any(line.startswith("rows.") for line in found):
        found = ["its rows had not been prepared before", *(line for line in found if not line.startswith("rows."))]
    if code := _code_changes(old.inputs, key.inputs):
        found.append(f"code: {_some(code)} changed")
    above = [name for name in key.inputs if name.startswith("key.") and old.inputs.get(name) != key.inputs[name]]
    found += [f"{name.removeprefix('key.')} has changed" for name in above]
    if not found and before.run != now:
        return [f"run {now} is a new one, and this is the first time that it gets here"]
    return found or ["it was not finished before"]


def _code_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the definitions and files that one side alone reaches, or that differ, each once also if several targets do."""
    targets = [name for name in sorted({*was, *now}) if name.startswith("code.") and was.get(name) != now.get(name)]
    old, new = ({item for name in targets for item in (side.get(name) or {}).items()} for side in (was, now))
    return sorted({name for name, _digest in old ^ new})


def _file_changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[FileChange]:
    yield from (FileChange(name=name, what="added") for name in sorted(new.keys() - old.keys()))
    yield from (FileChange(name=name, what="gone") for name in sorted(old.keys() - new.keys()))
    yield from (FileChange(name=name, what="changed") for name in sorted(old.keys() & new.keys()) if old[name] != new[name])


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else "")
