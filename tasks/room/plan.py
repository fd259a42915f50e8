"""What goes, and what stays because of what? Decides only, from listings; free.py acts.

A run of the pipeline goes when `retention` does not keep it and nothing holds it: the pipeline's next command, an alias, a run
that is kept. Runs of other pipelines stay. A dataset, unit or output of a stage goes when no run that stays refers to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from penstock.tasks.room.spec import RetentionSpec

__all__ = ["RECORD_BYTES", "Going", "Holdings", "Kind", "RoomPlan", "RunUse", "plan_room"]

RECORD_BYTES = 64 << 10
"""A record of a cleaned run stays up to this size: it is what `log`, `explain`, `compare` and `report` read."""

_ALWAYS = ("run.json", "sweep.json", "outbox.json")
_SMALL = ("code.json", "environment.txt", "journal", "attempts", "trials")
"""Records of a run; a folder counts as one."""

_SHRINK = ("run.json", "sweep.json", *_SMALL)

Kind = Literal["run", "dataset", "unit", "record"]


@dataclass(frozen=True)
class RunUse:
    """What a run refers to.

    Attributes:
        used: when it was last worked on.
        keys: stage -> key, as far as they are known.
        needs: other runs that it refers to: the one it began with, and the trials of a sweep.
        cleaned: it has gone before; only its records are left, or what a killed cleaning left of the rest.
    """

    run: str
    pipeline: str
    used: datetime
    sweep: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    cleaned: bool = False


@dataclass(frozen=True)
class Holdings:
    """What lies in a storage.

    Attributes:
        files: path -> bytes, below `runs`, `datasets`, `units`, `stages`, `profiles` and `pipelines`.
        units: dataset -> the units it is made of.
        held: run -> why it stays, however old it is.
        at_work: run -> who works on it. It stays, and does not count among the newest: it may come to nothing.
        busy: pipeline -> who works on a sweep of it: none of its runs goes, and under `sweeping` no prepared rows.
        sweeping: the trials of a sweep at work may use any prepared rows.
    """

    files: Mapping[str, int]
    runs: tuple[RunUse, ...]
    now: datetime
    units: Mapping[str, frozenset[str]] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)
    at_work: Mapping[str, str] = field(default_factory=dict)
    busy: Mapping[str, str] = field(default_factory=dict)
    sweeping: bool = False


@dataclass(frozen=True)
class Going:
    """One thing that goes.

    Attributes:
        name: id of the run, or key of the dataset or unit, or path of a record.
        paths: its files.
    """

    kind: Kind
    name: str
    size_bytes: int
    why: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class RoomPlan:
    """What goes, and what stays.

    Attributes:
        kept: run -> why it stays.
        used: names of what they refer to, and their own; None while a sweep may use anything but old runs.
        shrinking: paths of the records that stay of what goes; nobody writes them any more.
    """

    going: tuple[Going, ...]
    kept: Mapping[str, str]
    used: frozenset[str] | None
    shrinking: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of all that goes."""
        return sum(each.size_bytes for each in self.going)

    def names(self, kind: Kind) -> frozenset[str]:
        """What goes of one kind."""
        return frozenset(each.name for each in self.going if each.kind == kind)

    def uses(self, going: Going) -> bool:
        """Whether a run refers to what an earlier plan let go: it has begun between the two."""
        return going.name in self.kept or (going.kind != "run" if self.used is None else going.name in self.used)


def plan_room(found: Holdings, pipeline: str, retention: RetentionSpec) -> RoomPlan:
    """Say what goes of `pipeline`'s runs, and of what no run of the storage refers to any more."""
    kept = _kept(found, pipeline, retention)
    goes = [run for run in found.runs if run.run not in kept and run.pipeline == pipeline]
    using = [run for run in found.runs if run.run in kept]
    going = _runs(found, goes)
    if found.sweeping:
        return RoomPlan(tuple(going), kept, None)
    datasets = {key for run in using if (key := run.keys.get("materialize"))}
    units = {unit for key in datasets for unit in found.units.get(key, ())}
    records = {path for run in using for path in _records(run)}
    going += _unused(found, "dataset", datasets, "no run that stays has these rows")
    going += _unused(found, "unit", units, "in no dataset that stays")
    going += _unused_records(found, pipeline, goes, records)
    shrinking = _shrinking(found, goes, records | {path for each in going for path in each.paths})
    return RoomPlan(tuple(going), kept, frozenset(datasets | units | records), shrinking)


def _kept(found: Holdings, pipeline: str, retention: RetentionSpec) -> dict[str, str]:
    """Run -> why it stays; those that were cleaned are not among them."""
    alive = [run for run in found.runs if not run.cleaned]
    own = [run for run in alive if run.pipeline == pipeline]
    kept = {run.run: f"of pipeline {run.pipeline}" for run in alive if run.pipeline != pipeline}
    if pipeline in found.busy:
        kept |= {run.run: found.busy[pipeline] for run in own}
    ended = [run for run in own if run.sweep in (None, run.run) and run.run not in found.at_work]
    newest = sorted(ended, key=lambda run: (run.used, run.run), reverse=True)
    oldest = found.now - timedelta(days=retention.keep_days)
    for place, run in enumerate(newest[: retention.keep_runs]):
        if place == 0 or run.used >= oldest:
            kept.setdefault(run.run, "the newest run" if place == 0 else f"one of the newest {retention.keep_runs}")
    known = {run.run: run for run in alive}
    for name, why in {**found.held, **found.at_work}.items():
        if name in known:
            kept.setdefault(name, why)
    trials: dict[str, set[str]] = {}
    for run in own:
        if run.sweep is not None:
            trials.setdefault(run.sweep, set()).add(run.run)
    waiting = [*kept]
    while waiting:
        user = waiting.pop()
        for needed in sorted((known[user].needs | trials.get(user, set())) & known.keys() - kept.keys()):
            kept[needed] = f"used by {user}"
            waiting.append(needed)
    return kept


def _runs(found: Holdings, goes: Iterable[RunUse]) -> list[Going]:
    """The big files of the runs that go, and those that a killed cleaning left of others."""
    sizes = _by_folder(found.files, "runs")
    going = []
    for run in goes:
        files = _not_records(sizes.get(run.run, {}), len(f"runs/{run.run}/"))
        if files or not run.cleaned:
            why = "left by a cleaning that was killed" if run.cleaned else f"last worked on {run.used:%Y-%m-%d}"
            going.append(Going("run", run.run, sum(files.values()), why, tuple(files)))
    return going


def _not_records(files: Mapping[str, int], start: int) -> dict[str, int]:
    """Those of a run's files that are no small records."""
    parts: dict[str, int] = {}
    for path, size in files.items():
        part = path[start:].split("/", 1)[0]
        parts[part] = parts.get(part, 0) + size
    stay = {part for part, size in parts.items() if part in _ALWAYS or (part in _SMALL and size <= RECORD_BYTES)}
    return {path: size for path, size in files.items() if path[start:].split("/", 1)[0] not in stay}


def _unused(found: Holdings, kind: Kind, used: Collection[str], why: str) -> list[Going]:
    folders = _by_folder(found.files, f"{kind}s")
    return [Going(kind, name, sum(of.values()), why, tuple(of)) for name, of in sorted(folders.items()) if name not in used]


def _unused_records(found: Holdings, pipeline: str, goes: Iterable[RunUse], used: Collection[str]) -> list[Going]:
    """Outputs of stages, profiles and pointers to trainings that no run which stays has; of cleaned runs the large ones."""
    past = {path for run in found.runs for path in _records(run)}
    pointers = {path for run in goes for path in _records(run) if path.startswith(f"pipelines/{pipeline}/")}
    going = []
    for path, size in sorted(found.files.items()):
        if path in used or not (path in pointers or path.startswith(("stages/", "profiles/"))):
            continue
        if path in pointers:
            going.append(_record(path, size, "its run goes"))
        elif path not in past:
            going.append(_record(path, size, "of no run on record"))
        elif size > RECORD_BYTES:
            going.append(_record(path, size, f"of cleaned runs, and larger than {RECORD_BYTES >> 10} KiB"))
    return going


def _shrinking(found: Holdings, goes: Iterable[RunUse], others: Collection[str]) -> tuple[str, ...]:
    """Records of runs that go now, but for `others`: those that go too, and those of runs that stay."""
    now = [run for run in goes if not run.cleaned]
    folders, own = _by_folder(found.files, "runs"), {path for run in now for path in _records(run)}
    for run in now:
        start = len(f"runs/{run.run}/")
        own |= {path for path in folders.get(run.run, {}) if path[start:].split("/", 1)[0] in _SHRINK}
    return tuple(sorted(own & found.files.keys() - set(others)))


def _records(run: RunUse) -> list[str]:
    """Where records lie that belong to a key of the run."""
    paths = [f"stages/{stage}/{key}.json" for stage, key in run.keys.items()]
    paths.append(f"profiles/{run.keys.get('materialize')}.json")
    return [*paths, f"pipelines/{run.pipeline}/trainings/{run.keys.get('train')}.json"]


def _record(path: str, size: int, why: str) -> Going:
    return Going("record", path, size, why, (path,))


def _by_folder(files: Mapping[str, int], top: str) -> dict[str, dict[str, int]]:
    """Name of a folder in `top` -> its files."""
    found: dict[str, dict[str, int]] = {}
    for path, size in files.items():
        if path.startswith(f"{top}/") and path.count("/") > 1:
            found.setdefault(path.split("/", 2)[1], {})[path] = size
    return found
