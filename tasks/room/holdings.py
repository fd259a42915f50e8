"""What lies in a storage, and what does each run of it refer to?"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from penstock.errors import ResumeError
from penstock.ingest.manifest import DatasetManifest, manifest_path
from penstock.ingest.materialize.in_use import noted_units
from penstock.lease import LeaseHolder, current_holder
from penstock.redact import first_line
from penstock.storage import Storage
from penstock.tasks.records.at_work import holders_of_runs
from penstock.tasks.records.ledger import Ledger, Run, sweep_lease_path
from penstock.tasks.room.plan import Holdings, RunUse
from penstock.tasks.tune.record import current_sweep, load_trials

__all__ = ["look"]

_FOLDERS = ("runs", "datasets", "units", "stages", "profiles", "pipelines")

_READS_AT_ONCE = 16
"""Requests to a store that wait at the same time: each takes some 20 ms."""


def look(
    ledger: Ledger,
    pipeline: str,
    aliased: Mapping[str, str],
    *,
    own: Iterable[str] = (),
    known: Mapping[str, frozenset[str]] | None = None,
    marked: Collection[str] = (),
) -> Holdings:
    """List the storage and read the records of its runs.

    Args:
        aliased: version of a model, as `models:/name/3` -> the alias it has now.
        own: leases that this process holds.
        known: dataset -> its units, from an earlier look: its record may be gone by now.
        marked: runs that this cleaning has marked, and may take back.

    Raises:
        ResumeError: the record of a run cannot be read, so that nobody knows what it refers to.
    """
    storage = ledger.storage
    files = {path: size for folder in _FOLDERS for path, size in storage.tree(folder).items()}
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        runs = [run for run in pool.map(lambda name: _run(storage, name), _recorded(files)) if run is not None]
        uses = tuple(pool.map(lambda run: _use(ledger, run, run.cleaned is not None and run.run not in marked), runs))
        datasets = sorted({path.split("/")[1] for path in files if path.startswith("datasets/")})
        units = dict(zip(datasets, pool.map(lambda key: _units(storage, key), datasets), strict=True))
    for key, before in (known or {}).items():
        units[key] = units.get(key, frozenset()) | before
    busy, sweeping = _sweeping(storage, {path.split("/")[1] for path in files if path.startswith("pipelines/")}, {*own})
    own_runs = [run for run in runs if run.pipeline == pipeline]
    working = {run: f"a run is at work: {holder.process}" for run, holder in holders_of_runs(storage, pipeline).items()}
    # One that is done takes its place among the newest, although its process still cleans up, as `retention` says.
    done = {run.run: working[run.run] for run in own_runs if run.status == "done" and run.run in working}
    return Holdings(
        files=files,
        runs=uses,
        now=dt.datetime.now(dt.UTC),
        units=units,
        held={**done, **dict(_held(ledger, pipeline, own_runs, aliased))},
        at_work={run: why for run, why in working.items() if run not in done},
        busy=busy,
        sweeping=sweeping,
    )


def _recorded(files: Iterable[str]) -> list[str]:
    """Runs with a record: one without has only begun, and uses nothing yet."""
    return sorted(path.split("/")[1] for path in files if path.startswith("runs/") and path.endswith("/run.json"))


def _run(storage: Storage, name: str) -> Run | None:
    """The run's record; None if a person has deleted it since it was listed."""
    try:
        return Run.model_validate_json(storage.read_record(f"runs/{name}/run.json"))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ResumeError(
            f"the record of run {name} cannot be read, so that nobody knows what it uses: {first_line(error)}",
            next_step=f"restore {storage.uri(f'runs/{name}/run.json')} from a backup, or delete the folder it is in; a newer "
            "penstock may have written it",
        ) from error


def _use(ledger: Ledger, run: Run, cleaned: bool) -> RunUse:
    needs = {str(trial.run) for trial in load_trials(ledger.storage, run.run) if trial.run} if run.sweep == run.run else set()
    start = str(run.spec.get("train", {}).get("start_from") or "")
    if start.startswith("run:"):
        needs.add(start.removeprefix("run:"))
    times = [run.created]
    if not cleaned:
        times += [time for attempt in ledger.attempts(run.run) for time in (attempt.started, attempt.ended) if time]
    return RunUse(
        run=run.run,
        pipeline=run.pipeline,
        used=max(map(dt.datetime.fromisoformat, times)),
        sweep=run.sweep,
        keys={stage: key.key for stage, key in run.keys.items() if key.key},
        needs=frozenset(needs),
        cleaned=cleaned,
    )


def _units(storage: Storage, dataset: str) -> frozenset[str]:
    """What a dataset is made of, or will be."""
    try:
        manifest = DatasetManifest.model_validate(storage.read_json(manifest_path(dataset)))
    except (FileNotFoundError, ValueError):
        return noted_units(storage, dataset)
    return noted_units(storage, dataset) | {unit.key for unit in manifest.units}


def _held(ledger: Ledger, pipeline: str, runs: Iterable[Run], aliased: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Runs that stay however old they are, and why."""
    current = ledger.current_run(pipeline)
    if current is not None:
        yield current.run, "the next run continues it"
    sweep = current_sweep(ledger.storage, pipeline)
    if sweep is not None:
        yield sweep.sweep, "the next tune continues it"
    for run in ledger.runs_with_alias(pipeline):
        yield run, "it gave an alias to its model last"
    for of in runs:
        alias = aliased.get(str(of.result.get("model_uri")))
        if alias is not None:
            yield of.run, f"its model is {alias}"


def _sweeping(storage: Storage, pipelines: Iterable[str], own: set[str]) -> tuple[dict[str, str], bool]:
    """Pipeline -> who works on a sweep of it, and whether there is one in the storage."""
    busy = {}
    for pipeline in sorted(pipelines):
        lease = sweep_lease_path(pipeline)
        holder: LeaseHolder | None = None if lease in own else current_holder(storage, lease)
        if holder is not None and not holder.brief:
            busy[pipeline] = f"a sweep is at work: {holder.process}"
    return busy, bool(busy)
