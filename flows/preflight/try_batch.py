"""Try real rows: prepare and cache a few hundred, and feed two of them to a recipe, or train two batches.

The functions are those of a run, so that a run fails later only for reasons of size. Two rows, because batch norm needs two,
and this machine may be smaller than those that train.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.parquet as pq

from penstock.config import added_sections
from penstock.errors import DataError, Interrupted, PenstockError
from penstock.flows.preflight.checks import file_with_rows
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.files.listing import SourceFile, list_source
from penstock.ingest.formats.registry import format_of, reader_of
from penstock.ingest.manifest import DatasetManifest, ShardTable
from penstock.ingest.materialize.build import materialize
from penstock.ingest.materialize.class_report import one_class, refuse_no_choice
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.preprocess.fit import fit_preprocess
from penstock.ingest.preprocess.named_columns import check_named_columns
from penstock.ingest.preprocess.transforms.map_batches import forget_instances
from penstock.ingest.ray_tasks import local_map
from penstock.ingest.read.snapshot import SourceSnapshot, iterate_rows, read_source
from penstock.ingest.read.splits import split_codes
from penstock.ingest.schema import SPLITS, Split
from penstock.ingest.shuffle.length_pools import find_column
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.shuffle.sampling import check_column
from penstock.ingest.spec import DataSpec, MaterializeSpec, ShuffleSpec
from penstock.machine.prints import aloud, passing_prints
from penstock.messages import counted
from penstock.progress import silent
from penstock.storage import Storage
from penstock.tasks.project import Project
from penstock.training.checkpoint.folder import files_in
from penstock.training.checkpoint.start_from import StartWeights
from penstock.training.evaluation.metrics import make_metrics, validation_metrics
from penstock.training.frameworks.framework import TriedBatch, TriesBatch
from penstock.training.frameworks.registry import FRAMEWORKS
from penstock.training.job import TrainJob
from penstock.training.registry.raw_rows import raw_form

if TYPE_CHECKING:
    from penstock.training.frameworks.trial import Tried

__all__ = ["try_one_batch"]

SAMPLE_ROWS = 512

TRIED_ROWS = 2

TRAINED_ROWS = 8192
"""The sample is repeated up to this: a function's batches may be larger than the sample, and it may drop smaller ones."""

SAMPLE_FILES = 8
"""Files the rows come from: a single file may hold one class only."""


def try_one_batch(
    project: Project,
    snapshot: SourceSnapshot | None = None,
    *,
    on_cluster: bool = False,
    for_sweep: bool = False,
    trains: bool = False,
    report: Callable[[str], None] = lambda _line: None,
) -> dict[str, Any]:
    """Send one batch of real rows through the transforms and the framework, as training does.

    Args:
        snapshot: the source if it was read already; without it only the beginning of the first train file is read.
        on_cluster: try the batch in a Ray task with the resources of a training worker; Ray is connected.
        for_sweep: check that a validation measures `tune.metric`, as far as one batch shows.
        trains: also train two batches in a process of their own, with a report and a checkpoint. Frameworks without
            `try_batch` do in any case.
        report: called with each line that user code prints, and for each wait on the cluster.

    Returns:
        `rows`, `columns`, the fields of the framework's `TriedBatch`, `asks_for` (columns that the registered model will
        need), `sample_rows`, `sized_by_sample` (transforms that may find more categories in all rows), `one_class` (a warning
        if the sample's labels are of one), `warnings`, `begins_with` if `train.start_from` is given, and `trained` (the
        fields of `Tried`) if two batches were trained.

    Raises:
        SpecError, DataError, TrainingError: naming the user's file and line if there is one.
    """
    with (
        passing_prints(lambda line: report(f"first batch: {line}")),
        tempfile.TemporaryDirectory(prefix="penstock-sample-") as folder,
    ):
        sample = _prepare(project, snapshot, Path(folder))
        tried = _try_framework(project, sample.storage, sample.manifest, on_cluster, for_sweep, aloud(report))
        if (trains or not isinstance(project.framework, TriesBatch)) and hasattr(project.framework, "try_rank"):
            lacks = sample.manifest.feed_schema.classes is not None and (snapshot is None or sample.rows < snapshot.rows)
            trained = _try_training(project, sample.manifest, Path(folder), on_cluster, aloud(report), may_lack_classes=lacks)
            tried["trained"] = trained.model_dump()
            tried["warnings"] += [f"training was not tried to the end: {trained.stuck}"] if trained.stuck else []
    part = snapshot is not None and sample.rows < snapshot.rows
    return {
        **tried,
        "asks_for": sample.asks_for,
        "sample_rows": sample.rows,
        "sized_by_sample": sample.sizing_transforms if part else [],
        "one_class": sample.one_class,
    }


class _Sample(NamedTuple):
    """A few hundred rows, prepared."""

    rows: int
    """Number of rows before preparation."""
    storage: Storage
    manifest: DatasetManifest
    sizing_transforms: list[str]
    """Transforms that learnt categories: with more of them in all rows, the model may be larger."""
    asks_for: list[str]
    """Columns that the registered model will need."""
    one_class: str = ""
    """Warns that the sample has one class only; it is tried as one of two."""


def _prepare(project: Project, snapshot: SourceSnapshot | None, folder: Path) -> _Sample:
    spec = project.spec
    a_row_each = reader_of(spec.data).one_row_per_file
    if snapshot is None:
        files = [file for file in project.files if file.location == "train"]
        files = _spread(files, SAMPLE_ROWS) if a_row_each else [file_with_rows(files)]
        snapshot = read_source(project.source, files, silent, only_heads=True)
    columns = {field.name: field.type for field in snapshot.arrow_schema()}
    check_named_columns(project.source, spec.preprocess, columns, spec.data.label)
    filled = [file for file in snapshot.files if file.location == "train" and file.rows]
    files = _spread(filled, SAMPLE_ROWS if a_row_each else SAMPLE_FILES)
    share = max(1, SAMPLE_ROWS // len(files))
    tables = []
    for file in files:
        if (batch := next(iterate_rows(spec.data, snapshot, [file], share), None)) is not None:
            split_codes(spec.data, batch.table, batch.files)  # refuses a column that no rule can go by
            tables.append(batch.table)
    rows = sum(table.num_rows for table in tables)
    if not rows:
        raise DataError(f"{files[0].uri} holds no rows")
    # One file for each source file, in the same order, so that an error can name the real file and row.
    (folder / "rows").mkdir()
    for number, table in enumerate(tables):
        pq.write_table(table, folder / "rows" / f"{number:06d}.parquet")
    try:
        sample = _Sample(rows, *_materialize(project, folder))
    except Interrupted:
        raise
    except PenstockError as error:
        raise _with_real_names(error, folder, files, rows) from None
    finally:
        forget_instances()
    schema, is_whole = sample.manifest.feed_schema, rows == sum(file.rows or 0 for file in filled)
    if schema.num_classes != 1:
        return sample._replace(one_class=one_class(sample.manifest)) if is_whole else sample
    if is_whole:
        refuse_no_choice(sample.manifest)
    classes = None if schema.classes is None else (*schema.classes, "another class")
    two = schema.model_copy(update={"num_classes": 2, "classes": classes})
    warning = (
        f"the label {schema.label!r} has one class in a sample of {counted(rows, 'row')}, which is tried as one of two; a run "
        "needs at least two: if all rows are of this class, correct the label"
    )
    return sample._replace(manifest=sample.manifest.model_copy(update={"feed_schema": two}), one_class=warning)


def _with_real_names(error: PenstockError, folder: Path, files: list[SourceFile], rows: int) -> PenstockError:
    """Return the error with the names of the source files in place of the sample's."""

    def real(text: str) -> str:
        for number, file in enumerate(files):
            text = text.replace(str(folder / "rows" / f"{number:06d}.parquet"), file.uri)
        return text

    lead = f"in a sample of {counted(rows, 'row')}: " if isinstance(error, DataError) else ""
    return type(error)(lead + real(error.message), problems=[*map(real, error.problems)], next_step=real(error.next_step))


def _materialize(project: Project, folder: Path) -> tuple[Storage, DatasetManifest, list[str], list[str]]:
    spec = project.spec
    # As Parquet the sample keeps the types it was read with, whatever the source's format.
    rows = DataSpec(format="parquet", train=str(folder / "rows"))
    listed = read_source(rows, list_source(rows, folder, format_of(rows).extensions).files, silent)
    data = spec.data.model_copy(update={"train": rows.train, "validation": None, "test": None})
    fitted = fit_preprocess(data, spec.preprocess, listed, project.transforms, silent, parallel=local_map)
    storage = Storage(str(folder / "storage"))
    manifest = materialize(
        key="sample",
        preparation=Preparation(data, spec.preprocess, fitted, listed, project.transforms),
        spec=MaterializeSpec(),
        storage=storage,
        progress=silent,
        parallel=local_map,
    )
    sizing = [entry.step.kind for entry in fitted.steps if any(column.categories is not None for column in entry.columns)]
    read = listed.arrow_schema().empty_table()
    form = raw_form(spec.data, fitted, {}, read if data.columns is None else read.select(data.columns))
    return storage, manifest, sizing, [name for name in form.columns if name not in form.unneeded]


def _spread(files: list[SourceFile], count: int) -> list[SourceFile]:
    """Choose `count` files, spread evenly."""
    stride = max(1, len(files) // count)
    return files[::stride][:count]


def _first_batch(project: Project, storage: Storage, manifest: DatasetManifest) -> Batch:
    """Return two rows, or one if the budget of entries of a step never holds two."""
    by_length = project.spec.shuffle.by_length
    if by_length is not None:
        find_column(by_length, manifest.feed_schema.columns)
    order = make_order(ShuffleSpec(mode="none", by_length=by_length), manifest.rows["train"])
    feed = open_cached_feed([(storage, manifest)], "train", batch_rows=TRIED_ROWS, order=order)
    return max(feed.batches(0), key=lambda batch: batch.rows) if order.by_length is not None else next(feed.batches(0))


def _try_framework(
    project: Project,
    storage: Storage,
    manifest: DatasetManifest,
    on_cluster: bool,
    for_sweep: bool,
    report: Callable[[str], None],
) -> dict[str, Any]:
    train, sample = project.spec.train, project.spec.shuffle.sample
    batch = _first_batch(project, storage, manifest)
    if sample is not None:
        check_column(sample, manifest.feed_schema.columns)
    trained = project.framework.check(project.recipe, train)
    best = train.checkpoint.best if train.loop is None else None  # a function reports names of its own
    measured = validation_metrics(best, manifest.feed_schema, trained)
    make_metrics(project.spec.evaluate.metrics, manifest.feed_schema, trained)
    if (promote := project.spec.register_.promote) is not None and not promote.is_reported:
        make_metrics([promote.metric.partition("/")[2]], manifest.feed_schema, trained, "register.promote.metric")
    seed, schema = project.spec.shuffle.seed, manifest.feed_schema
    there = partial(_try_batch, train.framework, project.recipe, train, schema, batch, seed)
    if not isinstance(project.framework, TriesBatch):
        tried = TriedBatch(logged=getattr(project.framework, "logged", None))
    elif on_cluster:
        from penstock.training.on_ray.one_worker import on_one_worker  # it loads Ray

        tried = on_one_worker(train, "the first batch", there, report)
    else:
        tried = there()
    # A callback of the user's or of a package may chart values, too: then the first validation shows them.
    if for_sweep and tried.logged is not None and not any(each.code or each.origin for each in project.callbacks):
        names = [name for one in measured.makers for name in ([one, f"{one}_*"] if measured.raw else [one])]
        for section in added_sections(project.spec):
            if (error := section.unmeasured(["val/loss", *(f"val/{name}" for name in names), *tried.logged])) is not None:
                raise error
    columns = {c.name: c.type_text for c in schema.columns}
    begins = {"begins_with": _begins_with(start, tried)} if (start := project.start_from) is not None else {}
    found = tried.model_dump(exclude={"weights", "logged"})
    return {"rows": batch.rows, "columns": columns, **found, "warnings": [], **begins}


def _try_training(
    project: Project,
    manifest: DatasetManifest,
    folder: Path,
    on_cluster: bool,
    report: Callable[[str], None],
    *,
    may_lack_classes: bool,
) -> Tried:
    from penstock.training.frameworks.trial import ROWS, RUN, try_apart  # it loads Ray

    spec, shuffle = project.spec.train, project.spec.shuffle
    shards = manifest.shards_of("train")
    copies = -(-TRAINED_ROWS // manifest.rows["train"])
    data = project.spec.data
    splits: list[Split] = [*(split for split in SPLITS[1:] if getattr(data, split) is not None), *data.datasets]
    whole = [*[*shards] * copies, *(shard.model_copy(update={"split": split}) for split in splits for shard in shards)]
    rows = {"train": copies * manifest.rows["train"], **dict.fromkeys(splits, manifest.rows["train"])}
    run = Storage(str(folder / RUN))
    if (start := project.start_from) is not None:
        start.store(run)
    manifest = manifest.model_copy(update={"table": ShardTable.of(whole), "rows": rows})
    data_storage = Storage(str(folder / ROWS))
    manifest.table.write(data_storage, manifest.key)  # a job is sent without it
    job = TrainJob(
        run_storage=run,
        data_storage=data_storage,
        manifest=manifest,
        order=make_order(ShuffleSpec(mode="none", by_length=shuffle.by_length), rows["train"]),
        spec=spec.model_copy(update={"workers": 1, "max_steps": 2, "compile": False}),
        seed=shuffle.seed,
        code=project.recipe,
        attempt=1,
        pipeline=project.spec.name,
        callbacks=project.callbacks,
        data_config=project.data_config,
    )

    def tried(job: TrainJob) -> Tried:
        if not on_cluster:
            return try_apart(spec.framework, job)
        from penstock.training.on_ray.one_worker import on_one_worker

        there = partial(try_apart, spec.framework, job, {name: path.read_bytes() for name, path in files_in(folder).items()})
        return on_one_worker(spec, "the first two batches", there, report)

    try:
        return tried(job)
    except Interrupted:
        raise
    except PenstockError as error:
        if start is None or not may_lack_classes:
            raise
        why = f"train.start_from does not fit a sample, which may lack classes of the label: {error.message}"
        fresh = tried(replace(job, spec=job.spec.model_copy(update={"start_from": None})))
        return fresh.model_copy(update={"stuck": fresh.stuck or why})


def _begins_with(start: StartWeights, tried: TriedBatch) -> str | None:
    """Describe the weights of `train.start_from` that the model takes; None if the framework does not expose its weights."""
    if tried.weights is None:
        return None
    from penstock.training.checkpoint.matching import describe_matching, read_weights  # most do without

    return describe_matching(tried.weights, read_weights(start.read()), start.name)


def _try_batch(framework: str, *arguments: Any) -> TriedBatch:
    found = FRAMEWORKS.get(framework)
    assert isinstance(found, TriesBatch)
    return found.try_batch(*arguments)
