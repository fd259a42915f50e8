"""What lies in a storage, and what does each run of it refer to?"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from penstock.errors import LeaseHeldError, ResumeError
from penstock.ingest.manifest import DatasetManifest
from penstock.lease import current_holder
from penstock.plugins import needed
from penstock.redact import first_line
from penstock.storage import Storage
from penstock.tasks.records.at_work import holders_of_runs
from penstock.tasks.records.ledger import Ledger, Run, lease_path, sweep_lease_path
from penstock.tasks.retention.plan import Inventory, RunUse

__all__ = ["take_inventory"]

_FOLDERS = ("runs", "datasets", "units", "stages", "profiles", "sources")

_READS_AT_ONCE = 16
"""Requests to a store that wait at the same time: each takes some 20 ms."""


def take_inventory(ledger: Ledger, pipeline: str, aliased: Mapping[str, str]) -> Inventory:
    """List the storage and read the records of its runs.

    Args:
        aliased: version of a model, as `models:/name/3` -> the alias it has now.

    Raises:
        LeaseHeldError: a sweep of the pipeline is at work, or a run of any begins: what they need is not known.
        ResumeError: the record of a run cannot be read, so that what it refers to is not known.
    """
    storage = ledger.storage
    files = {path: size for folder in _FOLDERS for path, size in storage.tree(folder).items()}
    names = sorted(path.split("/")[1] for path in files if path.startswith("runs/") and path.endswith("/run.json"))
    datasets = sorted({path.split("/")[1] for path in files if path.startswith("datasets/")})
    sources = {path.split("/")[1] for path in files if path.startswith("sources/")}
    with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
        runs = [run for run in pool.map(lambda name: _run(storage, name), names) if run is not None]
        uses = tuple(pool.map(lambda run: _use(ledger, run, sources), runs))
        units = dict(zip(datasets, pool.map(lambda key: _units(storage, key), datasets), strict=True))
        # All at once: a dead holder on another machine is watched for 15 s.
        pipelines = storage.list("pipelines")
        beginning = pool.map(lambda each: current_holder(storage, lease_path(each), watch=True), pipelines)
        for each, holder in zip(pipelines, beginning, strict=True):
            if holder is not None:
                raise LeaseHeldError(
                    f"a run of pipeline {each!r} begins or is repaired: {holder.process}", next_step="clean again in a moment"
                )
        holders = pool.map(lambda each: holders_of_runs(storage, each, watch=True), pipelines)
        sweeps = pool.map(lambda each: current_holder(storage, sweep_lease_path(each), watch=True), pipelines)
    # A run that is done counts as ended, although its process may still clean up, as `retention` has it.
    done = {run.run for run in runs if run.status == "done"}
    working: dict[str, str] = {}
    for each, of_runs, holder in zip(pipelines, holders, sweeps, strict=True):
        working |= {run: f"run {run} is at work: {of.process}" for run, of in of_runs.items() if run not in done}
        if holder is not None:
            if each == pipeline:
                raise LeaseHeldError(
                    f"a sweep of pipeline {pipeline!r} is at work: {holder.process}", next_step="clean when it has ended"
                )
            working[f"sweep of {each}"] = f"a sweep of pipeline {each!r} is at work: {holder.process}"
    return Inventory(
        files=files,
        runs=uses,
        now=dt.datetime.now(dt.UTC),
        units=units,
        held=dict(_held(ledger, pipeline, (run for run in runs if run.pipeline == pipeline), aliased)),
        at_work=working,
    )


def _run(storage: Storage, name: str) -> Run | None:
    """The run's record; None if a person has deleted it since it was listed."""
    try:
        return Run.model_validate_json(storage.read_bytes(f"runs/{name}/run.json"))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ResumeError(
            f"the record of run {name} cannot be read, so that what it uses is not known: {first_line(error)}",
            next_step=f"restore {storage.uri(f'runs/{name}/run.json')} from a backup, or delete the folder it is in; a newer "
            "penstock may have written it",
        ) from error


def _use(ledger: Ledger, run: Run, sources: Iterable[str]) -> RunUse:
    needs = set()
    if run.sweep == run.run:
        load_trials = needed("penstock.tasks.tune.record:load_trials", f"what the sweep {run.run} uses")
        needs = {str(trial.run) for trial in load_trials(ledger.storage, run.run) if trial.run}
    start = str(run.spec.get("train", {}).get("start_from") or "")
    if start.startswith("run:"):
        needs.add(start.removeprefix("run:"))
    times = [run.created]
    if run.cleaned is None:
        times += [time for attempt in ledger.attempts(run.run) for time in (attempt.started, attempt.ended) if time]
    key = run.keys["read"].key if sources and "read" in run.keys else ""
    text = f"{run.spec} {ledger.stage_record(f'stages/read/{key}.json', key, cleaned=True) if key else ''}"
    return RunUse(
        run=run.run,
        pipeline=run.pipeline,
        used=max(map(dt.datetime.fromisoformat, times)),
        sweep=run.sweep,
        keys={stage: key.key for stage, key in run.keys.items() if key.key},
        needs=frozenset(needs),
        sources=frozenset(each for each in sources if each in text),
        cleaned=run.cleaned is not None,
    )


def _units(storage: Storage, dataset: str) -> frozenset[str]:
    manifest = DatasetManifest.read(storage, dataset)
    return frozenset(manifest.shards.units if manifest is not None else ())


def _held(ledger: Ledger, pipeline: str, runs: Iterable[Run], aliased: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Runs that are kept however old they are, and why."""
    current = ledger.current_run(pipeline)
    if current is not None:
        yield current.run, "the next run continues it"
    for run in ledger.runs_with_alias(pipeline):
        yield run, "it gave an alias to its model last"
    for of in runs:
        if of.sweep == of.run:
            current_sweep = needed("penstock.tasks.tune.record:current_sweep", f"whether the sweep {of.run} goes on")
            if current_sweep(ledger.storage, of.pipeline) == of.run:
                yield of.run, "the next tune continues it"
        alias = aliased.get(str(of.result.get("model_uri")))
        if alias is not None:
            yield of.run, f"its model is {alias}"
