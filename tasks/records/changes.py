"""What differs between two attempts (spec, code, data, versions), and which of these differences made a stage run again?"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from penstock.config import Section
from penstock.tasks.records.keys import StageKey, changed_inputs, short_value
from penstock.tasks.records.ledger import Ledger, Run
from penstock.tasks.stages import STAGES, StageName
from penstock.usercode.capture import Definitions
from penstock.usercode.source import canonical

__all__ = ["Before", "Change", "Changes", "changes", "why_run"]

_DIGEST = re.compile(r"\b[0-9a-f]{32}\b")

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


class CodeChange(Section):
    """One file of the user's code that does something else."""

    targets: tuple[str, ...]
    """Targets that reach it, on either side."""
    file: str
    names: tuple[str, ...] = ()
    """The definitions that differ; empty where the file is not Python, or its source is not on record."""

    def __str__(self) -> str:
        return f"{self.file}" + (f": {_some(self.names)}" if self.names else "")


class Changes(Section):
    """Everything that decides a run's result and differs between two."""

    spec: tuple[Change, ...] = ()
    code: tuple[CodeChange, ...] = ()
    files: tuple[FileChange, ...] = ()
    versions: tuple[Change, ...] = ()

    def lines(self) -> list[str]:
        """Format the differences, the most important first."""
        by_kind = {what: [file.name for file in self.files if file.what == what] for what in ("added", "gone", "changed")}
        data = [f"data: {what} {_some(names)}" for what, names in by_kind.items() if names]
        code = [f"code: {change}" for change in dict.fromkeys(map(str, self.code))]
        return [*data, *code, *(f"spec: {change}" for change in self.spec), *(f"version: {c}" for c in self.versions)]


class Before(Section):
    """One side of a comparison: what is on record of a run."""

    run: str
    spec: dict[str, Any]
    keys: dict[str, StageKey]
    code: dict[str, Definitions] = Field(default_factory=dict)

    @classmethod
    def of(cls, ledger: Ledger, run: Run) -> Before:
        """Read a run from the ledger."""
        return cls(run=run.run, spec=run.spec, keys=run.keys, code=ledger.code_of(run.run))

    def definitions(self, targets: Iterable[str], file: str) -> dict[str, str]:
        """Return name -> source of each definition that the targets reach in a file."""
        return {name: text for each in targets for name, text in self.code.get(each, {}).get(file, {}).items()}


def changes(before: Before, after: Before) -> Changes:
    """Compare two runs."""
    old, new = (dict(_leaves(side.spec)) for side in (before, after))
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
        code=tuple(change for was, now in pairs for change in _code_changes(was, now, before, after)),
        files=tuple(_file_changes(*read)),
        versions=tuple(Change(name=name, before=was, after=now) for name, (was, now) in versions.items()),
    )


def why_run(stage: StageName, key: StageKey, before: Before | None, now: Before) -> list[str]:
    """Explain why a stage cannot reuse an output: each input that differs from the run before, down to the definition."""
    old = before.keys.get(stage) if before is not None else None
    if before is None or old is None:
        return ["it has never run"]
    found = [line for line in changed_inputs(old.inputs, key.inputs) if not line.startswith("code.")]
    if not any(name.startswith("rows.") for name in old.inputs) and any(line.startswith("rows.") for line in found):
        found = ["its rows had not been prepared before", *(line for line in found if not line.startswith("rows."))]
    found += [f"code: {change} changed" for change in _code_changes(old.inputs, key.inputs, before, now)]
    above = [name for name in key.inputs if name.startswith("key.") and old.inputs.get(name) != key.inputs[name]]
    found = [_without_digests(line) for line in found] + [f"{name.removeprefix('key.')} has changed" for name in above]
    if not found and before.run != now.run:
        return [f"run {now.run} is a new one, and this is the first time that it gets here"]
    return found or ["it was not finished before"]


def _without_digests(line: str) -> str:
    name, separator, values = line.partition(": ")
    return f"{name}: others than before" if separator and len(_DIGEST.findall(values)) == 2 else line


def _code_changes(was: Mapping[str, Any], now: Mapping[str, Any], before: Before, after: Before) -> Iterator[CodeChange]:
    """Yield each changed file once, also if several targets reach it."""
    codes = [name for name in sorted({*was, *now}) if name.startswith("code.") and was.get(name) != now.get(name)]
    targets = tuple(name.removeprefix("code.") for name in codes)
    old, new = (_by_file([side.get(name) or {} for name in codes]) for side in (was, now))
    for file in sorted({*old, *new}):
        if old.get(file) != new.get(file):
            names = _changed_names(before.definitions(targets, file), after.definitions(targets, file))
            yield CodeChange(targets=targets, file=file, names=tuple(names))


def _changed_names(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the definitions of one file that differ, down to a class's methods; comments and docstrings do not count.

    A class that only one side has is named as a whole.
    """
    both = before.keys() & after.keys()
    old, new = (dict(_members(side, both)) for side in (before, after))
    return [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]


def _members(sources: Mapping[str, str], taken_apart: Collection[str]) -> Iterator[tuple[str, object]]:
    """Yield (name, syntax tree) of each definition; a class that is taken apart gives its methods, and its rest, one by one."""
    for name, text in sources.items():
        body = ast.parse(text).body
        if name in taken_apart and len(body) == 1 and isinstance(body[0], ast.ClassDef):
            methods = [node for node in body[0].body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            yield from ((f"{name}.{method.name}", canonical(method)) for method in methods)
            body[0].body = [node for node in body[0].body if node not in methods]
        yield name, canonical(body)


def _by_file(reached: Iterable[Mapping[str, str]]) -> dict[str, set[str]]:
    """Map each file to the digests of its reached code."""
    found: dict[str, set[str]] = {}
    for each in reached:
        for file, digest in each.items():
            found.setdefault(file, set()).add(digest)
    return found


def _file_changes(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[FileChange]:
    yield from (FileChange(name=name, what="added") for name in sorted(new.keys() - old.keys()))
    yield from (FileChange(name=name, what="gone") for name in sorted(old.keys() - new.keys()))
    yield from (FileChange(name=name, what="changed") for name in sorted(old.keys() & new.keys()) if old[name] != new[name])


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every entry of a spec that is not None."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{prefix}.{index}")
    elif value is not None:
        yield prefix, value


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else "")
