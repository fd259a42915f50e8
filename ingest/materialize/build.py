"""How does a source become a cached dataset? In units that are committed one by one; the manifest, written last, completes it.

Layout: `units/<unit key>/<split>-<nnnnn>.arrow`, `units/<unit key>/unit.json`, `datasets/<key>/manifest.json`,
and `datasets/<key>/lease`, held by the process that makes it; other processes wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.digest import digest_of
from penstock.errors import DataError
from penstock.ingest.files.content_digests import content_digests
from penstock.ingest.files.opening import STORE_REQUESTS
from penstock.ingest.files.unit_plan import plan_units
from penstock.ingest.manifest import UNIT_RECORD, DatasetManifest, ShardInfo, ShardTable, manifest_path, unit_path
from penstock.ingest.materialize.overlap import Begin, check_as_predicted, predict_dataset
from penstock.ingest.materialize.profile import merged
from penstock.ingest.materialize.shared_rows import SharedRows, shared_rows
from penstock.ingest.materialize.unit import (
    UnitJob,
    UnitRecord,
    UnitResult,
    begin_unit,
    committed,
    incomplete_shards,
    schema_difference,
    unit_key,
)
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.preprocess.problems import RowProblem, raise_for
from penstock.ingest.preprocess.transform_spec import FittedPreprocess
from penstock.ingest.ray_tasks import ParallelMap, processes_at_once, ray_map
from penstock.ingest.read.inspection import PART_BYTES
from penstock.ingest.schema import SPLITS, FeedSchema, Split
from penstock.ingest.spec import DataSpec, MaterializeSpec
from penstock.lease import LeaseHolder, hold_lease
from penstock.progress import Progress
from penstock.storage import Storage

__all__ = ["damaged_shards", "materialize", "plan_jobs"]

_UNITS_PER_TASK, _TASKS_PER_CPU, _TASKS_PER_GPU = 4, 2, 8
"""Upper limit of the units of a task, and lower limit of the tasks for each CPU; tasks for each GPU."""

_SHARDS_AT_ONCE = 1 << 14
"""Shards that are objects at the same time while all are checked."""

_UNITS_LISTED_ONE_BY_ONE = 1024
"""For more units of a store, the folder of all units is listed: a thousand files a request, where a unit has a few."""


def materialize(
    *,
    key: str,
    preparation: Preparation,
    spec: MaterializeSpec,
    storage: Storage,
    progress: Progress,
    parallel: ParallelMap = ray_map,
    piece_bytes: int = PART_BYTES,
    is_kept: bool = True,
    begin: Begin | None = None,
) -> DatasetManifest:
    """Prepare all rows and commit them as a dataset. Units that are committed already are not made again.

    Runs on the driver; Ray must be initialised unless `parallel` is `local_map`. For an existing dataset, the units of damaged
    shards are made again. Existing units, also those of other datasets, are used if their shards have the right sizes and, on a
    local disk, the right digests; shards of a store are checked when they are fetched.

    Args:
        key: the materialize stage's key, which names the dataset.
        piece_bytes: a file of at least twice this size is prepared in units of about this size, if its format allows it.
        is_kept: False for a storage that keeps nothing. Else other processes see it, and wait for the dataset's lease.
        begin: called once the units that are there are checked and the first is made; it sets the order of the others.

    Raises:
        DataError: rows that cannot be used (with the count and the first row of each kind over all units), a wrong transform
            or column, or a damaged unit that came out differently. With `begin`, the bad rows of the first unit that has some.
    """
    jobs = plan_jobs(preparation, spec, storage, piece_bytes)

    def report_wait(holder: LeaseHolder) -> None:
        progress(0, len(jobs), "units", f"waiting for {holder.process}, which prepares the same rows")

    with hold_lease(storage, f"datasets/{key}/lease", brief=True, on_wait=report_wait) if is_kept else nullcontext():
        return _build_units(key, preparation, jobs, storage, progress, parallel, begin)


def _build_units(
    key: str,
    preparation: Preparation,
    jobs: Sequence[UnitJob],
    storage: Storage,
    progress: Progress,
    parallel: ParallelMap,
    begin: Begin | None,
) -> DatasetManifest:
    data, fitted = preparation.data, preparation.fitted
    before = DatasetManifest.read(storage, key)  # None also for one of another version
    damaged = [] if before is None else damaged_shards(storage, before, deep=True)
    damaged_units = {shard.unit for shard in damaged}
    results: dict[str, UnitResult] = {}
    existing = _committed(storage, [job.key for job in jobs if job.key not in damaged_units])
    changed = {shard.unit for shard in _changed(storage, [shard for record in existing for shard in record.shards])}
    results |= {record.key: UnitResult(record=record) for record in existing if record.key not in changed}
    todo = [replace(job, again=job.key in damaged_units | changed) for job in jobs if job.key not in results]
    predicted: DatasetManifest | None = None
    if begin is not None:
        for job in todo:
            # Of a unit that was not damaged, another process may have committed the record since the look above.
            if storage.is_local and not job.again and (record := committed(storage, job.key)) is not None:
                results[job.key] = UnitResult(record=record)
            elif job.again or storage.is_local:  # the record of a damaged unit, which training would believe
                storage.delete(unit_path(job.key, UNIT_RECORD))
        predicted = predict_dataset(key, jobs, _first_record(jobs, todo, results, data, parallel), data, fitted)
        predicted.table.write(storage, key)
        place = {unit: number for number, unit in enumerate(begin(predicted))}
        todo = sorted((job for job in todo if job.key not in results), key=lambda job: place.get(job.key, len(place)))
    total = sum(job.rows for job in jobs)
    done = total - sum(job.rows for job in todo)
    progress(done, total, "rows", f"{len(results)} of {len(jobs)} units were there")
    rows_of = {job.key: job.rows for job in todo}
    # Two datasets made at once begin at different units, and each takes those that the other has made. Large ones come first:
    # one that is started last would leave the other workers idle.
    at = int(digest_of(key)[:8], 16) % max(1, len(todo))
    ordered = sorted([*todo[at:], *todo[:at]], key=lambda job: -job.rows.bit_length())
    for made in parallel(_build, _tasks(ordered) if begin is None else [[job] for job in todo]):
        results |= made
        if begin is not None and any(result.record is None for result in made.values()):
            break  # training waits for it: `raise_for` raises
        done += sum(rows_of[unit] for unit in made)
        progress(done, total, "rows")
    raise_for([problem for job in jobs if job.key in results for problem in results[job.key].problems], label=data.label)
    records = [record for job in jobs if (record := results[job.key].record) is not None]
    _check_repaired(storage, key, records, damaged)
    shared = shared_rows(records, {job.key: job.files for job in jobs}, storage)
    if shared and data.duplicates == "refuse":
        raise DataError(
            "data.duplicates: refuse: rows are in two splits, so that metrics would cover rows that the model was trained on",
            problems=[str(found) for found in shared],
            next_step="remove them from one split; or hold rows out by a rule (data.test: {fraction: 0.1}), which keeps "
            "equal rows together",
        )
    manifest = _manifest(key, data, fitted, records, shared)
    if predicted is not None:
        check_as_predicted(predicted, manifest)
        manifest = manifest.model_copy(update={"split_digests": predicted.split_digests})
    manifest.write(storage)
    return manifest


def _first_record(
    jobs: Sequence[UnitJob], todo: Sequence[UnitJob], results: dict[str, UnitResult], data: DataSpec, parallel: ParallelMap
) -> UnitRecord:
    """Return the record of the first unit with rows to train on, which is made unless it is in `results`."""
    first = next((job.key for job in jobs if job.rows and job.split == "train"), "")
    for made in parallel(_build, [[job] for job in todo if job.key == first]):
        results |= made
    if first not in results:
        raise DataError("no rows are there to train on", next_step="check data.train")
    record, problems = results[first].record, results[first].problems
    raise_for(list(problems), label=data.label)
    assert record is not None
    return record


def damaged_shards(storage: Storage, manifest: DatasetManifest, *, deep: bool) -> list[ShardInfo]:
    """List the shards that are missing or have the wrong size, and those of units that are no longer committed.

    Nothing is fetched from a store: a fetched shard is checked, and a damaged one deletes its unit's record
    (penstock.ingest.feed.node_cache).

    Args:
        deep: on a local disk, also list shards with changed content. A shard is read unless this machine wrote or read it
            before and its times are unchanged.
    """
    shards = manifest.opened(storage).shards
    is_large = manifest.units > _UNITS_LISTED_ONE_BY_ONE
    listed = None if storage.is_local else storage.tree("units") if is_large else storage.small_tree("units")
    parts = (shards[begin : begin + _SHARDS_AT_ONCE] for begin in range(0, len(shards), _SHARDS_AT_ONCE))
    return [shard for part in parts for shard in _damaged(storage, part, listed, deep)]


def _damaged(storage: Storage, shards: Iterable[ShardInfo], listed: Mapping[str, int] | None, deep: bool) -> list[ShardInfo]:
    units: dict[str, list[ShardInfo]] = {}
    for shard in shards:
        units.setdefault(shard.unit, []).append(shard)
    if listed is not None:
        committed = {unit for unit in units if unit_path(unit, UNIT_RECORD) in listed}
        every = (shard for of_unit in units.values() for shard in of_unit)
        return [shard for shard in every if shard.unit not in committed or listed.get(shard.path) != shard.size_bytes]
    with ThreadPoolExecutor(1 if storage.is_local else STORE_REQUESTS) as pool:
        incomplete = pool.map(lambda unit: incomplete_shards(storage, unit, units[unit]), units)
        damaged = {shard.path for found in incomplete for shard in found}
    if deep:
        whole = [shard for of_unit in units.values() for shard in of_unit if shard.path not in damaged]
        damaged |= {shard.path for shard in _changed(storage, whole)}
    return [shard for of_unit in units.values() for shard in of_unit if shard.path in damaged]


def _committed(storage: Storage, keys: Sequence[str]) -> list[UnitRecord]:
    """Read the records of the committed units."""
    with ThreadPoolExecutor(1 if storage.is_local else STORE_REQUESTS) as pool:
        return [record for record in pool.map(partial(committed, storage), keys) if record is not None]


def _changed(storage: Storage, shards: Sequence[ShardInfo]) -> list[ShardInfo]:
    """List the shards on a local disk whose content has changed; shards of a store are checked when they are fetched."""
    if not storage.is_local:
        return []
    found = content_digests([str(storage.local_path(shard.path)) for shard in shards])
    return [shard for shard, digest in zip(shards, found, strict=True) if digest != shard.digest]


def _build(jobs: Sequence[UnitJob]) -> dict[str, UnitResult]:
    """Make units one after the other: each is committed while the next is prepared."""
    made: dict[str, UnitResult] = {}
    with ThreadPoolExecutor(1, "penstock-commit") as committing:  # finishes the commit even if the next unit fails
        running: dict[str, Future[UnitResult]] = {}
        for job in jobs:
            commit = begin_unit(job)
            made |= {key: future.result() for key, future in running.items()}
            running = {job.key: committing.submit(commit)}
        return made | {key: future.result() for key, future in running.items()}


def _tasks(jobs: Sequence[UnitJob]) -> list[Sequence[UnitJob]]:
    """Put neighbouring jobs into one task if there are many for each CPU. With GPUs a task is a process and loads the model."""
    gpus = max((entry.transform.num_gpus for job in jobs[:1] for entry in job.preparation.transforms), default=0.0)
    count = len(jobs) // (_TASKS_PER_GPU if gpus else _TASKS_PER_CPU) // processes_at_once(gpus)
    count = max(1, count if gpus else min(_UNITS_PER_TASK, count))
    return [jobs[begin : begin + count] for begin in range(0, len(jobs), count)]


def plan_jobs(preparation: Preparation, spec: MaterializeSpec, storage: Storage, piece_bytes: int) -> list[UnitJob]:
    """List the jobs that make all units, in row order. Opens large files to find their pieces."""
    jobs = []
    for files in plan_units(preparation.snapshot.files, spec.unit_bytes):
        for part in preparation.only(files).cut(piece_bytes):
            job = UnitJob("", part, spec.shard_bytes, storage)
            jobs.append(replace(job, key=unit_key(job)))
    return jobs


def _check_repaired(storage: Storage, key: str, records: Sequence[UnitRecord], damaged: Sequence[ShardInfo]) -> None:
    """Raise DataError if a shard that was made again has other rows: a training run may have read the old ones."""
    made = {shard.path: shard.digest for record in records for shard in record.shards}
    for shard in damaged:
        if shard.path in made and made[shard.path] != shard.digest:
            raise DataError(
                f"shard {shard.path} was damaged and came out differently when it was made again",
                next_step="make the map_batches functions give the same result for the same rows; or delete "
                f"{storage.uri(manifest_path(key))} to take the rows as they come out now",
            )


def _manifest(
    key: str, data: DataSpec, fitted: FittedPreprocess, records: Sequence[UnitRecord], shared: Sequence[SharedRows]
) -> DatasetManifest:
    splits = data.locations
    shards = [shard for split in splits for record in records for shard in record.shards if shard.split == split]
    rows: dict[Split, int] = {split: sum(shard.rows for shard in shards if shard.split == split) for split in splits}
    dropped = sum((Counter(record.dropped) for record in records), Counter())
    if not rows["train"]:
        left_out = ", ".join(f"{count:,} ({reason})" for reason, count in dropped.items())
        raise DataError(
            "no rows are left to train on" + (f"; left out: {left_out}" if left_out else ""),
            next_step="check data.train, the fractions of the other splits, and why rows are left out",
        )
    return DatasetManifest(
        key=key,
        feed_schema=_feed_schema(data, fitted, records),
        rows=rows,
        table=ShardTable.of(shards),
        units=len(records),
        rows_read=sum(record.rows_read for record in records),
        content_digest=digest_of([shard.digest for shard in shards]),
        split_digests={split: digest_of([shard.digest for shard in shards if shard.split == split]) for split in splits},
        extra={
            "class_counts": _class_counts(records),
            "dropped": dict(dropped),
            "first_dropped": {kind: place for record in reversed(records) for kind, place in record.first_dropped.items()},
            "profile": merged(record.profile for record in records).model_dump(mode="json"),
            "unseen_categories": dict(sum((Counter(record.unseen) for record in records), Counter())),
            "shared_rows": [found.model_dump() for found in shared],
        },
    )


def _feed_schema(data: DataSpec, fitted: FittedPreprocess, records: Sequence[UnitRecord]) -> FeedSchema:
    filled = [record for record in records if record.columns]
    first = filled[0]
    for record in filled[1:]:
        differing = schema_difference(first.columns, record.columns)
        if differing:
            raise DataError(
                f"{differing[0]} in {first.files[0]}, and {differing[1]} in {record.files[0]}; a column has one shape",
                next_step="cast it, resize it, or make the map_batches function return one dtype and shape",
            )
    num_classes, classes = fitted.num_classes, fitted.classes
    trained = [count.label for record in records for count in record.classes.get("train", ())]
    if num_classes is not None and trained and max(trained) >= num_classes:
        num_classes, classes = None, None  # a map_batches function has renumbered them
    if num_classes is None and trained:
        num_classes = max(trained) + 1
        _check_labels(data.label or "", num_classes, records)
    return FeedSchema(columns=first.columns, label=data.label, num_classes=num_classes, classes=classes)


def _check_labels(label: str, num_classes: int, records: Sequence[UnitRecord]) -> None:
    """Raise DataError for labels of validation and test that the model has no output for."""
    problems = [
        RowProblem(reason="label out of range", column=label, rows=count.rows, place=count.place, example=str(count.label))
        for split in SPLITS[1:]
        for record in records
        for count in record.classes.get(split, ())
        if count.label >= num_classes
    ]
    raise_for(problems, droppable=False)


def _class_counts(records: Sequence[UnitRecord]) -> dict[str, dict[str, int]]:
    """Count the rows of each class, by split."""
    counts: dict[str, Any] = {}
    for split in SPLITS:
        total: Counter[int] = Counter()
        for record in records:
            total.update({count.label: count.rows for count in record.classes.get(split, ())})
        if total:
            counts[split] = {str(label): total[label] for label in sorted(total)}
    return counts
