"""How does a source become a cached dataset? Unit by unit, each committed by itself; a manifest, written last, makes it exist.

Layout: `units/<unit key>/<split>-<nnnnn>.arrow`, `units/<unit key>/unit.json`, `datasets/<key>/manifest.json`,
and `datasets/<key>/lease`, held by the process that makes it: another one waits.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.digest import digest_of
from penstock.errors import DataError
from penstock.ingest.files.content_digests import content_digests
from penstock.ingest.files.unit_plan import plan_units
from penstock.ingest.manifest import DatasetManifest, ShardInfo, UnitInfo, manifest_path
from penstock.ingest.materialize.profile import merged
from penstock.ingest.materialize.quarantine import (
    FILE_NAME,
    check_budget,
    dataset_quarantine_path,
    join_parts,
    unit_quarantine_path,
)
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
from penstock.ingest.preprocess.fitted import FittedPreprocess
from penstock.ingest.preprocess.problems import RowProblem, raise_for
from penstock.ingest.ray_tasks import ParallelMap, cluster_cpus, ray_map
from penstock.ingest.read.inspection import PART_BYTES
from penstock.ingest.schema import SPLITS, FeedSchema, Split
from penstock.ingest.spec import DataSpec, MaterializeSpec
from penstock.lease import LeaseHolder, hold_lease
from penstock.progress import Progress
from penstock.storage import Storage

__all__ = ["damaged_shards", "materialize"]

_TOGETHER, _TURNS = 4, 2
"""At most so many units are one task, and there are at least so many tasks for each CPU."""

LISTINGS_AT_ONCE = 16
"""Requests to a store that wait at the same time: each takes some 20 ms, whatever it lists."""


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
) -> DatasetManifest:
    """Prepare all rows and commit them as a dataset. Units that are committed already are not made again.

    Runs on the driver; Ray must be initialised unless `parallel` is `local_map`. Called again for a dataset that exists, it
    makes the units of damaged shards again. Those and units of other datasets are taken over if their sizes are right and, on a
    local disk, their hashes; from a store each shard is checked when it is fetched.

    Args:
        key: the materialize stage's key, which names the dataset.
        piece_bytes: a file of twice as much is prepared in units of about this size, if it can be read so.
        is_kept: the storage is one in which other processes may make the same dataset; the first makes it, and others wait.

    Raises:
        DataError: rows that cannot be used (all units are looked at, and counts and the first row of each kind reported; under
            `data.invalid: quarantine`, until there are more than its budget allows), a
            transform or column that is wrong, or a damaged unit that came out differently.
    """
    jobs = _plan(preparation, spec, storage, piece_bytes)
    if not is_kept:
        return _build_units(key, preparation, jobs, storage, progress, parallel)
    with hold_lease(storage, f"datasets/{key}/lease", brief=True, on_wait=partial(_tell_wait, progress, len(jobs))):
        return _build_units(key, preparation, jobs, storage, progress, parallel)


def _tell_wait(progress: Progress, units: int, holder: LeaseHolder) -> None:
    progress(0, units, "units", f"waiting for {holder.process}, which prepares the same rows")


def _build_units(
    key: str,
    preparation: Preparation,
    jobs: Sequence[UnitJob],
    storage: Storage,
    progress: Progress,
    parallel: ParallelMap,
) -> DatasetManifest:
    data, fitted = preparation.data, preparation.fitted
    damaged = _damaged_before(storage, key)
    damaged_units = {shard.unit for shard in damaged}
    results: dict[str, UnitResult] = {}
    there = _committed(storage, [job.key for job in jobs if job.key not in damaged_units])
    changed = {shard.unit for shard in _changed(storage, [shard for record in there for shard in record.shards])}
    results |= {record.key: UnitResult(record=record) for record in there if record.key not in changed}
    todo = [replace(job, again=job.key in damaged_units | changed) for job in jobs if job.key not in results]
    total = sum(job.rows for job in jobs)
    done = total - sum(job.rows for job in todo)
    progress(done, total, "rows", f"{len(results)} of {len(jobs)} units were there")
    rows_of = {job.key: job.rows for job in todo}
    set_aside = sum(_set_aside(result) for result in results.values())
    for made in parallel(_build, _in_turn(_begun_apart(key, todo))):
        results |= made
        set_aside += sum(map(_set_aside, made.values()))
        if data.invalid == "quarantine" and set_aside > data.quarantine.limit(total):
            break  # the check says so
        done += sum(rows_of[unit] for unit in made)
        progress(done, total, "rows")
    if data.invalid == "quarantine":
        found = [results[job.key] for job in jobs if job.key in results]
        check_budget(data.quarantine, [problem for result in found for problem in _problems(result)], total)
    raise_for([problem for job in jobs for problem in results[job.key].problems], label=data.label)
    records = [record for job in jobs if (record := results[job.key].record) is not None]
    _check_repaired(storage, key, records, damaged)
    shared = shared_rows(records, {job.key: job.files for job in jobs}, storage)
    if shared and data.duplicates == "refuse":
        raise DataError(
            "data.duplicates: refuse: rows are in two splits, and the model would be judged on what it has seen",
            problems=[str(found) for found in shared],
            next_step="take them out of one split; or take held-out rows by a rule (data.test: {fraction: 0.1}), which keeps "
            "equal rows together",
        )
    manifest = _manifest(key, data, fitted, records, shared)
    if manifest.rows_quarantined:
        _list_quarantined(key, records, storage)
    storage.write_json(manifest_path(key), manifest.model_dump(mode="json"))
    return manifest


def _problems(result: UnitResult) -> tuple[RowProblem, ...]:
    return result.problems if result.record is None else result.record.problems


def _set_aside(result: UnitResult) -> int:
    return sum(problem.rows for problem in _problems(result))


def _list_quarantined(key: str, records: Sequence[UnitRecord], storage: Storage) -> None:
    """One table of the rows that all units have set aside. Written before the manifest, and again after a kill in between."""
    paths = [unit_quarantine_path(record.key) for record in records if record.quarantined]
    with tempfile.TemporaryDirectory(prefix="penstock-quarantine-") as folder:
        table = Path(folder) / FILE_NAME
        join_parts(table, [partial(storage.read_bytes, path) for path in paths])
        storage.put_file(table, dataset_quarantine_path(key))


def damaged_shards(storage: Storage, manifest: DatasetManifest, *, deep: bool) -> list[ShardInfo]:
    """List the shards that are missing or have the wrong size, and those of units that are not committed any more.

    Nothing is fetched from a store for it: where a shard is fetched it is checked, and one that turns out damaged takes its
    unit's record with it (penstock.ingest.feed.node_cache).

    Args:
        deep: on a local disk, list those whose content has changed, too. It is read where this machine has not written or read
            it before, or where its times are others since.
    """
    units: dict[str, list[ShardInfo]] = {}
    for shard in manifest.shards:
        units.setdefault(shard.unit, []).append(shard)

    with ThreadPoolExecutor(1 if storage.is_local else LISTINGS_AT_ONCE) as pool:
        incomplete = pool.map(lambda unit: incomplete_shards(storage, unit, units[unit]), units)
        damaged = {shard.path for found in incomplete for shard in found}
    if deep:
        whole = [shard for shard in manifest.shards if shard.path not in damaged]
        damaged |= {shard.path for shard in _changed(storage, whole)}
    return [shard for of_unit in units.values() for shard in of_unit if shard.path in damaged]


def _committed(storage: Storage, keys: Sequence[str]) -> list[UnitRecord]:
    """The records of those units that are committed."""
    with ThreadPoolExecutor(1 if storage.is_local else LISTINGS_AT_ONCE) as pool:
        return [record for record in pool.map(partial(committed, storage), keys) if record is not None]


def _changed(storage: Storage, shards: Sequence[ShardInfo]) -> list[ShardInfo]:
    """Those of a local disk's shards that hold something else than was written; from a store it shows when they are fetched."""
    if not storage.is_local:
        return []
    found = content_digests([str(storage.local_path(shard.path)) for shard in shards])
    return [shard for shard, digest in zip(shards, found, strict=True) if digest != shard.digest]


def _build(jobs: Sequence[UnitJob]) -> dict[str, UnitResult]:
    """Make units one after the other: each is brought to disk and committed while the next is prepared."""
    made: dict[str, UnitResult] = {}
    with ThreadPoolExecutor(1, "penstock-commit") as committing:  # which ends its work, whatever becomes of the next unit
        on_their_way: dict[str, Future[UnitResult]] = {}
        for job in jobs:
            commit = begin_unit(job)
            made |= {key: commits.result() for key, commits in on_their_way.items()}
            on_their_way = {job.key: committing.submit(commit)}
        return made | {key: commits.result() for key, commits in on_their_way.items()}


def _in_turn(jobs: Sequence[UnitJob]) -> list[Sequence[UnitJob]]:
    """Neighbouring jobs together where there are many for each CPU."""
    together = max(1, min(_TOGETHER, len(jobs) // (_TURNS * cluster_cpus())))
    return [jobs[begin : begin + together] for begin in range(0, len(jobs), together)]


def _begun_apart(key: str, jobs: Sequence[UnitJob]) -> Sequence[UnitJob]:
    """The jobs from a place on that the dataset's key decides, and then those before it; those of many rows first.

    Two datasets that share units and are made at the same time so begin with different ones, and each takes over what the other
    has committed by then. A lease for each unit would spare the last ones, too, for two requests and, on a store, half a second
    a unit. A large one begun last would keep one worker busy while the others have nothing to do; those of about as many rows
    (to a power of two) stay in their order.
    """
    begin = int(digest_of(key)[:8], 16) % max(1, len(jobs))
    return sorted([*jobs[begin:], *jobs[:begin]], key=lambda job: -job.rows.bit_length())


def _plan(preparation: Preparation, spec: MaterializeSpec, storage: Storage, piece_bytes: int) -> list[UnitJob]:
    jobs = []
    data, snapshot = preparation.data, preparation.snapshot
    limit = data.quarantine.limit(snapshot.rows)

    for files in plan_units(snapshot.files, spec.unit_bytes):
        for part in preparation.only(files).cut(piece_bytes):
            job = UnitJob("", part, spec.shard_bytes, storage, limit)
            jobs.append(replace(job, key=unit_key(job)))
    return jobs


def _damaged_before(storage: Storage, key: str) -> list[ShardInfo]:
    """The damaged shards of the dataset as it was committed before; none if it was not, or by another version."""
    try:
        before = DatasetManifest.model_validate(storage.read_json(manifest_path(key)))
    except (FileNotFoundError, ValueError):
        return []
    return damaged_shards(storage, before, deep=True)


def _check_repaired(storage: Storage, key: str, records: Sequence[UnitRecord], damaged: Sequence[ShardInfo]) -> None:
    """A training run may have seen the old rows: the same name must not come to mean others."""
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
    shards = [shard for split in SPLITS for record in records for shard in record.shards if shard.split == split]
    rows: dict[Split, int] = {split: sum(shard.rows for shard in shards if shard.split == split) for split in SPLITS}
    dropped = sum((Counter(record.dropped) for record in records), Counter())
    quarantined = sum(record.quarantined for record in records)
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
        shards=tuple(shards),
        units=tuple(
            UnitInfo(key=r.key, files=r.files, rows_read=r.rows_read, rows_dropped=sum(r.dropped.values())) for r in records
        ),
        content_digest=digest_of([shard.digest for shard in shards]),
        split_digests={split: digest_of([shard.digest for shard in shards if shard.split == split]) for split in SPLITS},
        extra={
            "class_counts": _class_counts(records),
            "dropped": dict(dropped),
            **({"quarantined": quarantined} if quarantined else {}),
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
        num_classes, classes = None, None  # a map_batches function has numbered them anew
    if num_classes is None and trained:
        num_classes = max(trained) + 1
        _check_labels(data.label or "", num_classes, records)
    return FeedSchema(columns=first.columns, label=data.label, num_classes=num_classes, classes=classes)


def _check_labels(label: str, num_classes: int, records: Sequence[UnitRecord]) -> None:
    """Every label of validation and test must be one that the model has an output for."""
    problems = [
        RowProblem(reason="label out of range", column=label, rows=count.rows, place=count.place, example=str(count.label))
        for split in SPLITS[1:]
        for record in records
        for count in record.classes.get(split, ())
        if count.label >= num_classes
    ]
    raise_for(problems, droppable=False)


def _class_counts(records: Sequence[UnitRecord]) -> dict[str, dict[str, int]]:
    """Rows per class, by split."""
    counts: dict[str, Any] = {}
    for split in SPLITS:
        total: Counter[int] = Counter()
        for record in records:
            total.update({count.label: count.rows for count in record.classes.get(split, ())})
        if total:
            counts[split] = {str(label): total[label] for label in sorted(total)}
    return counts
