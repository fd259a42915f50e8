"""Which data can be deleted, and what keeps the rest? Mark what kept runs refer to; all else goes. Decides only.

A run of the pipeline is kept by `retention`, or if the pipeline's next command, an alias, a process or another kept run
needs it. Runs of other pipelines are kept. Other data go if no kept run refers to them, sources only if cleaned ones do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from penstock.ingest.manifest import manifest_path
from penstock.tasks.retention.spec import RetentionSpec

__all__ = ["RECORD_BYTES", "CleanupPlan", "Deletion", "Inventory", "RunUse", "plan_cleanup"]

RECORD_BYTES = 64 << 10
"""A record of a cleaned run stays up to this size: `log`, `compare` and `report` read it."""

_ALWAYS = ("run.json", "outbox.json")
_SMALL = ("environment.txt", "journal", "attempts", "trials", "code")
"""Records of a run; a folder counts as one."""


@dataclass(frozen=True)
class RunUse:
    """What a run refers to.

    Attributes:
        used: when a process last worked on it.
        keys: stage -> key, as far as they are known.
        needs: other runs that it refers to: the one whose weights it began with, and the trials of a sweep.
        sources: folders in `sources` that its spec or its files name.
        cleaned: only its records are left, and what a killed cleaning did not delete.
    """

    run: str
    pipeline: str
    used: datetime
    sweep: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    sources: frozenset[str] = frozenset()
    cleaned: bool = False


@dataclass(frozen=True)
class Inventory:
    """What lies in a storage.

    Attributes:
        files: path -> bytes, below `runs`, `datasets`, `units`, `stages`, `profiles` and `sources`.
        units: dataset -> its units.
        held: run -> why it is kept, however old it is.
        at_work: run or sweep -> the process that works on it, and may use any prepared rows. Kept, and not among the newest.
    """

    files: Mapping[str, int]
    runs: tuple[RunUse, ...]
    now: datetime
    units: Mapping[str, frozenset[str]] = field(default_factory=dict)
    held: Mapping[str, str] = field(default_factory=dict)
    at_work: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Deletion:
    """One run, dataset, unit, source or record whose data are deleted.

    Attributes:
        name: id of the run, key of the dataset or unit, folder of the source, or path of a record.
        paths: its files.
    """

    kind: Literal["run", "dataset", "unit", "source", "record"]
    name: str
    size_bytes: int
    why: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class CleanupPlan:
    """What is deleted, and what stays.

    Attributes:
        kept: run -> why it stays.
        rows_stay: why no prepared rows go at all; empty if they may.
    """

    deletions: tuple[Deletion, ...]
    kept: Mapping[str, str]
    rows_stay: str = ""

    @property
    def size_bytes(self) -> int:
        """Return the bytes that are freed."""
        return sum(each.size_bytes for each in self.deletions)


def plan_cleanup(found: Inventory, pipeline: str, retention: RetentionSpec) -> CleanupPlan:
    """Decide which runs of `pipeline`, and which data of the storage, go."""
    kept = _kept(found, pipeline, retention)
    deletions = _of_runs(found, (run for run in found.runs if run.pipeline == pipeline and run.run not in kept))
    using = [run for run in found.runs if run.run in kept]
    datasets = {key for run in using if (key := run.keys.get("materialize"))}
    stay = next(iter(found.at_work.values()), "") or _units_not_known(found, datasets)
    if not stay:
        deletions += _of_rows(found, datasets)
        left = {name for run in found.runs for name in run.sources}.difference(*(run.sources for run in using))
        folders = _by_folder(found.files, "sources")
        deletions += [_deletion("source", name, folders[name], "copied for no kept run") for name in sorted(left)]
        # The record of a dataset that goes now is first cut to what stays of it.
        cut = {f"stages/materialize/{key}.json" for key in found.units}
        deletions += _large_records(found, cut | {path for run in using for path in _records(run)})
    return CleanupPlan(tuple(deletions), kept, stay)


def _units_not_known(found: Inventory, datasets: Collection[str]) -> str:
    """Format why no rows may go if the manifest of a kept run cannot be read: its units would count as those of no run."""
    damaged = sorted(key for key in datasets if manifest_path(key) in found.files and not found.units.get(key))
    if not damaged:
        return ""
    return f"the manifest or table of dataset {damaged[0]} is damaged, which a kept run uses; `penstock run` makes it again"


def _kept(found: Inventory, pipeline: str, retention: RetentionSpec) -> dict[str, str]:
    """Map each run that stays, cleaned ones excepted, to the reason."""
    alive = {run.run: run for run in found.runs if not run.cleaned}
    own = [run for run in alive.values() if run.pipeline == pipeline]
    kept = {run.run: f"of pipeline {run.pipeline}" for run in alive.values() if run.pipeline != pipeline}
    ended = [run for run in own if run.sweep in (None, run.run) and run.run not in found.at_work]
    newest = sorted(ended, key=lambda run: (run.used, run.run), reverse=True)
    oldest = found.now - timedelta(days=retention.keep_days)
    for place, run in enumerate(newest[: retention.keep_runs]):
        if place == 0 or run.used >= oldest:
            kept[run.run] = "the newest run" if place == 0 else f"one of the newest {retention.keep_runs}"
    for name, why in {**found.held, **found.at_work}.items():
        if name in alive:
            kept.setdefault(name, why)
    trials: dict[str, set[str]] = {}
    for run in own:
        if run.sweep is not None:
            trials.setdefault(run.sweep, set()).add(run.run)
    to_follow = [*kept]
    while to_follow:
        user = to_follow.pop()
        for needed in sorted((alive[user].needs | trials.get(user, set())) & alive.keys() - kept.keys()):
            kept[needed] = f"used by {user}"
            to_follow.append(needed)
    return kept


def _of_runs(found: Inventory, runs: Iterable[RunUse]) -> list[Deletion]:
    """List the files of runs for deletion, small records excepted."""
    folders, deletions = _by_folder(found.files, "runs"), []
    for run in runs:
        files = _without_records(folders.get(run.run, {}))
        if files or not run.cleaned:
            why = "left by a cleaning that was killed" if run.cleaned else f"last worked on {run.used:%Y-%m-%d}"
            deletions.append(Deletion("run", run.run, sum(files.values()), why, tuple(files)))
    return deletions


def _without_records(files: Mapping[str, int]) -> dict[str, int]:
    parts: dict[str, int] = {}
    for path, size in files.items():
        part = path.split("/")[2]
        parts[part] = parts.get(part, 0) + size
    stay = {part for part, size in parts.items() if part in _ALWAYS or (part in _SMALL and size <= RECORD_BYTES)}
    return {path: size for path, size in files.items() if path.split("/")[2] not in stay}


def _of_rows(found: Inventory, datasets: Collection[str]) -> list[Deletion]:
    """List the datasets and units that no kept run uses."""
    used = {unit for key in datasets for unit in found.units.get(key, ())}
    known = {unit for units in found.units.values() for unit in units}
    # A run that was stopped while it prepared rows takes over the units that it has made; no dataset names them yet.
    unfinished = any(f"stages/materialize/{key}.json" not in found.files for key in datasets)
    deletions = []
    for name, files in _by_folder(found.files, "datasets").items():
        if name not in datasets:
            deletions.append(_deletion("dataset", name, files, "no kept run has these rows"))
    for name, files in _by_folder(found.files, "units").items():
        if name not in used and (name in known or not unfinished):
            deletions.append(_deletion("unit", name, files, "in no dataset of a kept run"))
    return deletions


def _large_records(found: Inventory, used: Collection[str]) -> list[Deletion]:
    """List the large outputs of stages and profiles that only cleaned runs use."""
    return [
        _deletion("record", path, {path: size}, f"of no kept run, and larger than {RECORD_BYTES >> 10} KiB")
        for path, size in sorted(found.files.items())
        if path.startswith(("stages/", "profiles/")) and size > RECORD_BYTES and path not in used
    ]


def _records(run: RunUse) -> list[str]:
    return [*(f"stages/{stage}/{key}.json" for stage, key in run.keys.items()), f"profiles/{run.keys.get('materialize')}.json"]


def _deletion(kind: Literal["dataset", "unit", "source", "record"], name: str, files: Mapping[str, int], why: str) -> Deletion:
    return Deletion(kind, name, sum(files.values()), why, tuple(files))


def _by_folder(files: Mapping[str, int], top: str) -> dict[str, dict[str, int]]:
    """Group files by their folder in `top`."""
    found: dict[str, dict[str, int]] = {}
    for path, size in sorted(files.items()):
        if path.startswith(f"{top}/") and path.count("/") > 1:
            found.setdefault(path.split("/", 2)[1], {})[path] = size
    return found
