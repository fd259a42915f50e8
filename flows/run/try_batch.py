"""Does one real batch go through everything? A few hundred rows are prepared, cached and fed to what is trained.

The same functions as in a run do the work, so what passes here fails later only for reasons of size.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from penstock.errors import DataError, Interrupted, PenstockError
from penstock.ingest.feed.batch import Batch, FeedShare
from penstock.ingest.feed.cached import open_cached_feed, open_parts
from penstock.ingest.feed.lists import batch_rows_of
from penstock.ingest.files.listing import SourceFile, list_source
from penstock.ingest.formats.registry import format_of, reader_of
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.build import materialize
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.preprocess.fit import fit_preprocess
from penstock.ingest.ray_tasks import local_map
from penstock.ingest.read.snapshot import SourceSnapshot, iterate_rows, read_source
from penstock.ingest.shuffle.length_pools import find_column
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.shuffle.sampling import check_column
from penstock.ingest.spec import DataSpec, MaterializeSpec, ShuffleSpec
from penstock.progress import silent
from penstock.storage import Storage
from penstock.tasks.project import Project
from penstock.training.evaluation.metrics import make_metrics, validation_metrics

__all__ = ["try_one_batch"]


SAMPLE_ROWS = 512

SAMPLE_FILES = 8
"""Rows come from so many files, since one file may hold one class only."""


def try_one_batch(project: Project, snapshot: SourceSnapshot | None = None) -> dict[str, Any]:
    """Send one batch of real rows through the transforms and the framework, which does with it what training will do.

    Args:
        snapshot: the source if it was read already; without it only the first train file is read.

    Returns:
        `rows`, `columns`, and what the framework's `TriedBatch` holds.

    Raises:
        SpecError, DataError, TrainingError: what is wrong, naming the user's file and line where there is one.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-sample-") as folder:
        storage, manifest = _prepare(project, snapshot, Path(folder))
        return _try_framework(project, storage, manifest)


def _prepare(project: Project, snapshot: SourceSnapshot | None, folder: Path) -> tuple[Storage, DatasetManifest]:
    spec = project.spec
    a_row_each = reader_of(spec.data).one_row_per_file
    if snapshot is None:
        files = [file for file in project.files if file.location == "train"]
        # Spark and Dask write parts without rows; one of half the mean size or more has some.
        half = sum(file.size_bytes for file in files) / len(files) / 2
        files = _spread(files, SAMPLE_ROWS) if a_row_each else [next(file for file in files if file.size_bytes >= half)]
        snapshot = read_source(project.source, files, silent)
    filled = [file for file in snapshot.files if file.location == "train" and file.rows]
    files = _spread(filled, SAMPLE_ROWS if a_row_each else SAMPLE_FILES)
    share = max(1, SAMPLE_ROWS // len(files))
    first = (next(iterate_rows(spec.data, snapshot, [file], share), None) for file in files)
    tables = [batch.table for batch in first if batch is not None]
    if not sum(table.num_rows for table in tables):
        raise DataError(f"{files[0].uri} holds no rows")
    # One file for each of the source's, in its order, so that an error can name the real one and the row in it.
    (folder / "rows").mkdir()
    for number, table in enumerate(tables):
        pq.write_table(table, folder / "rows" / f"{number:06d}.parquet")
    try:
        return _materialize(project, folder)
    except Interrupted:
        raise
    except PenstockError as error:
        raise _with_real_names(error, folder, files, sum(table.num_rows for table in tables)) from None


def _with_real_names(error: PenstockError, folder: Path, files: list[SourceFile], rows: int) -> PenstockError:
    """The same error about the source's files instead of the sample's."""

    def real(text: str) -> str:
        for number, file in enumerate(files):
            text = text.replace(str(folder / "rows" / f"{number:06d}.parquet"), file.uri)
        return text

    lead = f"in a sample of {rows:,} rows: " if isinstance(error, DataError) else ""
    return type(error)(lead + real(error.message), problems=[*map(real, error.problems)], next_step=real(error.next_step))


def _materialize(project: Project, folder: Path) -> tuple[Storage, DatasetManifest]:
    spec = project.spec
    # As Parquet the sample keeps the types it was read with, whatever the source's format, which still says what columns mean.
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
    return storage, manifest


def _spread(files: list[SourceFile], count: int) -> list[SourceFile]:
    """`count` of the files, evenly over all of them."""
    step = max(1, len(files) // count)
    return files[::step][:count]


def _first_batch(project: Project, storage: Storage, manifest: DatasetManifest) -> Batch:
    """The rows that a worker has in hand at once in a step: of its share, one of `train.accumulate` parts."""
    train, shuffle = project.spec.train, project.spec.shuffle
    if shuffle.by_length is not None:
        find_column(shuffle.by_length, manifest.feed_schema.columns)
    order = make_order(ShuffleSpec(mode="none", by_length=shuffle.by_length), manifest.rows["train"])
    if shuffle.by_length is None or shuffle.by_length.batch_entries is None:
        rows = min(manifest.rows["train"], max(2, train.batch_rows // train.workers // train.accumulate))
        return next(open_cached_feed(storage, manifest, "train", batch_rows=rows, order=order).batches(0))
    # How many rows fit the budget of entries is known only once the whole step is made. The last rank's share is never empty;
    # the largest one, because a step may hold what the others left of the sample.
    last = FeedShare(train.batch_rows, rank=train.workers - 1, world_size=train.workers)
    steps = open_parts([(storage, manifest)], "train", order=order, part=last).batches(0)
    batch = max(steps, key=lambda step: step.rows)
    rows = -(-batch.rows // train.accumulate)
    columns = batch_rows_of(batch.columns, 0, rows, manifest.feed_schema.packed)
    return batch._replace(columns=columns, row_ids=batch.row_ids[:rows], rows=rows)


def _try_framework(project: Project, storage: Storage, manifest: DatasetManifest) -> dict[str, Any]:
    train, sample = project.spec.train, project.spec.shuffle.sample
    batch = _first_batch(project, storage, manifest)
    if sample is not None:
        check_column(sample, manifest.feed_schema.columns)
    trained = project.framework.check(project.recipe, train)
    validation_metrics(train.checkpoint.best, manifest.feed_schema, trained)
    make_metrics(project.spec.evaluate.metrics, manifest.feed_schema, trained)
    tried = project.framework.try_batch(project.recipe, train, manifest.feed_schema, batch, project.spec.shuffle.seed)
    columns = {c.name: c.type_text for c in manifest.feed_schema.columns}
    return {"rows": batch.rows, "columns": columns, **tried.model_dump()}
