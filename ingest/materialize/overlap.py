"""Which shards will a dataset have? Predicted after its first unit, so that training can begin while the others are made.

Needs row counts that the source knows. Predicted shards lack their digests: the record of their unit has these once it is
committed, so digests of splits are of keys of units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.digest import digest_of
from penstock.errors import DataError
from penstock.ingest.manifest import DatasetManifest, ShardInfo, ShardTable
from penstock.ingest.materialize.shard_file import rows_of_shards
from penstock.ingest.materialize.unit import UnitJob, UnitRecord
from penstock.ingest.preprocess.transform_spec import FittedPreprocess
from penstock.ingest.schema import FeedSchema
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml

__all__ = ["Begin", "check_as_predicted", "predict_dataset"]

Begin = Callable[[DatasetManifest], Sequence[str]]
"""Called with the predicted dataset; returns keys of units in the order in which training needs them."""

_WITHOUT = "set materialize.overlap: false, which prepares all rows before training begins"


def predict_dataset(
    key: str, jobs: Sequence[UnitJob], first: UnitRecord, data: DataSpec, fitted: FittedPreprocess
) -> DatasetManifest:
    """Predict the manifest of a dataset, with an open table.

    Args:
        jobs: of all units, in row order, each of files of one split.
        first: record of the first unit with rows of the train split.

    Raises:
        DataError: the label has whole numbers, and the number of classes is not known.
    """
    expected, found = next(job.rows for job in jobs if job.key == first.key), sum(shard.rows for shard in first.shards)
    if found != expected:
        raise DataError(
            f"materialize.overlap: a unit of {expected:,} rows has {found:,} after the transforms",
            next_step=f"let the functions in preprocess return as many rows as they get, or {_WITHOUT}",
        )
    label = next((column for column in first.columns if column.name == data.label), None)
    if first.classes and fitted.num_classes is None and label is not None:
        raise DataError(
            f"materialize.overlap: the label {label.name!r} is {label.type_text}, and the number of its classes is known only "
            "when all rows are prepared",
            next_step=f"add the transform label_encoder, or, for a quantity, cast: {{{in_yaml(label.name)}: float32}}; or "
            f"{_WITHOUT}",
        )
    row_bytes = sum(shard.size_bytes for shard in first.shards) / sum(shard.rows for shard in first.shards)
    shards = [
        ShardInfo.pending(job.key, split, number, rows, int(rows * row_bytes))
        for split in data.locations
        for job in jobs
        if job.split == split
        for number, rows in enumerate(rows_of_shards(first.columns, job.rows, job.shard_bytes))
    ]
    return DatasetManifest(
        key=key,
        feed_schema=FeedSchema(columns=first.columns, label=data.label, num_classes=fitted.num_classes, classes=fitted.classes),
        rows={split: sum(job.rows for job in jobs if job.split == split) for split in data.locations},
        table=ShardTable.of(shards),
        units=len(jobs),
        rows_read=sum(job.rows for job in jobs),
        content_digest=digest_of([job.key for job in jobs]),
        split_digests={split: digest_of([job.key for job in jobs if job.split == split]) for split in data.locations},
    )


def check_as_predicted(predicted: DatasetManifest, made: DatasetManifest) -> None:
    """Raise DataError unless the dataset has the predicted columns, classes and shards."""
    pairs = zip(predicted.shards, made.shards, strict=False)
    differing = next(((one, two) for one, two in pairs if (one.path, one.rows) != (two.path, two.rows)), None)
    if differing is None and predicted.feed_schema == made.feed_schema and predicted.rows == made.rows:
        return
    what = "other columns or classes than its first unit"
    if differing is not None:
        one, two = differing
        what = f"a shard {two.path} of {two.rows:,} rows, where {one.path} of {one.rows:,} rows was expected"
    elif predicted.rows != made.rows:
        what = f"{made.rows} rows, where {predicted.rows} were expected"
    raise DataError(f"materialize.overlap: the prepared dataset has {what}", next_step=_WITHOUT)
