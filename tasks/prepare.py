"""The stages read, preprocess and materialize: which rows are there, what do transforms learn of them, how are they kept?

Prepared rows are an immutable cached dataset, in Ray's object store, or only counted and described.
"""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import DataError
from penstock.ingest.feed.stream_tasks import share_streams
from penstock.ingest.manifest import DatasetManifest, manifest_path
from penstock.ingest.materialize.build import damaged_shards
from penstock.ingest.materialize.build import materialize as materialize_dataset
from penstock.ingest.materialize.class_report import classes_text, empty_splits, one_class, refuse_no_choice, untried_classes
from penstock.ingest.materialize.profile import MAX_FILES, Profile
from penstock.ingest.materialize.shared_rows import SharedRows
from penstock.ingest.materialize.without_disk import RowSource
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.preprocess.fit import fit_preprocess, needs_fit
from penstock.ingest.read.inspection import is_much
from penstock.ingest.read.snapshot import read_source
from penstock.ingest.read.strata import with_strata
from penstock.ingest.schema import SPLITS
from penstock.messages import counted, in_yaml
from penstock.plugins import optional
from penstock.tasks.context import Outcome, RunContext
from penstock.tasks.overlap import begin_overlapped, tasks_beside_workers
from penstock.tasks.records.data import RunData, dataset_name
from penstock.tasks.stage import Facts, Stage, VerifyContext
from penstock.training.job import FeedOpener
from penstock.training.open_feeds import MemoryFeeds, StreamFeeds

__all__ = ["MATERIALIZE", "PREPROCESS", "READ", "feed_opener", "preparation_of"]

_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""Names of an index in files that pandas has written: in CSV, in CSV that it read and wrote again, in Parquet."""

_MOST_CLASSES = 20
"""A label of more whole floats is a quantity, such as an age."""


def _read(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    data, files = ctx.project.source, ctx.project.files
    parallel = ctx.parallel("read") if is_much(data, files) else None
    if parallel is not None:
        ctx.need_ray()
    # With `cache: none` the rows are prepared in every epoch, and a copy would have to stay as long.
    keep = ctx.project.spec.materialize.cache != "none"
    snapshot = read_source(data, files, ctx.reporter.progress("read"), parallel=parallel, keep=keep)
    return with_strata(data, snapshot, parallel).model_dump(mode="json"), "ran"


def _read_facts(output: dict[str, Any]) -> Facts:
    files = output["files"]  # columns of their fields (`as_columns`): there may be millions
    versions = sorted({state.replace("-", " ", 1) for state in files.get("state", ()) if state})
    return (
        *((output["format"], version) for version in versions),
        ("rows", f"{sum(rows or 0 for rows in files.get('rows', ())):,}"),
        ("files", f"{len(files['name']):,}"),
        ("size", f"{sum(files['size_bytes']) / 1e6:,.1f} MB"),
        ("columns", ", ".join(f"{column['name']}: {column['type']}" for column in output["columns"])),
    )


def _preprocess(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    spec = ctx.project.spec
    if needs_fit(spec.preprocess):
        ctx.need_ray()
    progress, parallel = ctx.reporter.progress("preprocess"), ctx.parallel("preprocess")
    fitted = fit_preprocess(spec.data, spec.preprocess, ctx.snapshot, ctx.project.transforms, progress, parallel=parallel)
    return fitted.model_dump(mode="json"), "ran"


def feed_opener(ctx: RunContext) -> FeedOpener | None:
    """Return how `train` and `evaluate` read rows that are not on disk; None for rows on disk.

    Starts Ray, and with `cache: memory` prepares all rows again if this attempt has not prepared them.

    Raises:
        DataError: rows that had to be prepared again for one of these stages came out differently.
    """
    cache = ctx.project.spec.materialize.cache
    if cache == "disk":
        return None
    ctx.need_ray()
    if ctx.open_feeds is None:
        if cache == "none":
            ranks = ctx.project.spec.train.workers
            ctx.open_feeds = StreamFeeds(_source(ctx), share_streams(ranks) if ranks > 1 else None)
        elif _put(ctx).content_digest != ctx.manifest.content_digest:
            raise DataError(
                "the rows of cache: memory are gone with the attempt that prepared them, and they come out differently now",
                next_step="make the map_batches functions give the same result for the same rows, or use cache: disk",
            )
    return ctx.open_feeds


def preparation_of(ctx: RunContext) -> Preparation:
    """Collect what turns the run's source rows into rows to train on."""
    spec = ctx.project.spec
    return Preparation(spec.data, tuple(spec.preprocess), ctx.fitted, ctx.snapshot, dict(ctx.project.transforms))


def _source(ctx: RunContext) -> RowSource:
    spec = ctx.project.spec
    return RowSource(preparation_of(ctx), spec.materialize, where=spec.prepare)


def _put(ctx: RunContext) -> DatasetManifest:
    manifest, datasets = _source(ctx).put(ctx.keys["materialize"].key, ctx.reporter.progress("materialize"))
    ctx.open_feeds = MemoryFeeds(datasets)
    return manifest


def _materialize(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    ctx.need_ray()
    spec = ctx.project.spec
    if (
        spec.overlaps
        and ctx.may_overlap
        and ctx.will_train
        and (spec.materialize.overlap is True or tasks_beside_workers(spec))
    ):
        return begin_overlapped(ctx, preparation_of(ctx), partial(_conclude, ctx)), "begun"
    if spec.materialize.cache == "disk":
        manifest = _put_on_disk(ctx)
    elif spec.materialize.cache == "memory":
        manifest = _put(ctx)
    else:
        manifest = _source(ctx).describe(ctx.keys["materialize"].key, ctx.reporter.progress("materialize"))
    return _conclude(ctx, manifest), "ran"


def _conclude(ctx: RunContext, manifest: DatasetManifest) -> dict[str, Any]:
    """Judge the prepared rows, and return the stage's output."""
    if forget := optional("penstock.ingest.read.parsed.rows:forget_parsed"):
        forget(ctx.project.spec.data, ctx.snapshot.format, ctx.snapshot.files)
    refuse_no_choice(manifest)
    if manifest.rows_left_out:
        first = "".join(f"; the first with {reason}: {place}" for reason, place in manifest.extra["first_dropped"].items())
        ctx.warn(f"materialize: rows left out: {manifest.rows_left_out}{first}")
    if unseen := manifest.extra.get("unseen_categories"):
        ctx.warn(f"materialize: values that train does not have (unknown: ignore or code), by column: {unseen}")
    for found in _shared(manifest):
        ctx.warn(f"materialize: {found}, so the model is judged on rows it has seen")
    of_columns = (ctx.snapshot.describe_missing_columns(), _pandas_index_warning(ctx))
    for warning in (
        *of_columns,
        untried_classes(manifest),
        one_class(manifest),
        _whole_label_warning(ctx, manifest),
        *empty_splits(manifest, ctx.project.spec.data),
    ):
        if warning:
            ctx.warn(f"materialize: {warning}")
    extra = dict(manifest.extra)
    # Beside the record: it may be large, and the manifest is sent to every worker.
    profile = Profile.model_validate(extra.pop("profile"))
    ctx.ledger.save_profile(ctx.keys["materialize"].key, profile.model_dump(mode="json"))
    return manifest.model_copy(update={"extra": extra}).model_dump(mode="json")


def _shared(manifest: DatasetManifest) -> list[SharedRows]:
    return [SharedRows.model_validate(found) for found in manifest.extra.get("shared_rows", ())]


def _put_on_disk(ctx: RunContext) -> DatasetManifest:
    return materialize_dataset(
        key=ctx.keys["materialize"].key,
        preparation=preparation_of(ctx),
        spec=ctx.project.spec.materialize,
        storage=ctx.storage,
        progress=ctx.reporter.progress("materialize"),
        parallel=ctx.parallel("materialize"),
        begin=(lambda _predicted: ()) if ctx.project.spec.overlaps else None,  # the same digests
    )


def _whole_label_warning(ctx: RunContext, manifest: DatasetManifest) -> str:
    """Format a warning if the label is of floats that are all whole and few, as classes beside a missing one; else empty."""
    label = manifest.feed_schema.label
    read_as_floats = label in [field.name for field in ctx.snapshot.arrow_schema() if pa.types.is_floating(field.type)]
    if label is None or not read_as_floats or not manifest.table.counts.get("train"):
        return ""
    first = manifest.shards_of("train")[0]
    batch = pa.ipc.open_file(pa.BufferReader(ctx.storage.read_bytes(first.path))).get_batch(0)
    if not pa.types.is_floating(batch.schema.field(label).type):
        return ""
    values = pc.unique(batch.column(label)).to_pylist()
    if len(values) > _MOST_CLASSES or not all(value.is_integer() for value in values) or 2 * len(values) > batch.num_rows:
        return ""
    named = ", ".join(f"{value:g}" for value in sorted(values)[:5])
    return (
        f"the label {label!r} holds whole numbers only ({named}), and is learnt as a quantity (a regression), as its type is "
        f"{batch.schema.field(label).type}; if they are classes, add the transform label_encoder, or "
        f"data.types: {{{in_yaml(label)}: int64}}"
    )


def _pandas_index_warning(ctx: RunContext) -> str:
    """Format a warning if a column looks like a saved pandas index; empty if none does, or it is dropped."""
    dropped = {name for entry in ctx.project.spec.preprocess for name in entry.transform.drops}
    index = [
        field.name
        for field in ctx.snapshot.arrow_schema()
        if _INDEX.fullmatch(field.name) and pa.types.is_integer(field.type) and field.name not in dropped
    ]
    if not index:
        return ""
    return (
        f"column {index[0]!r} is the number of the row, as pandas writes it: a model may learn the order of the rows from it; "
        f"leave it out: preprocess: - drop: [{in_yaml(index[0])}]"
    )


def _verify(context: VerifyContext, output: dict[str, Any]) -> str | None:
    cache = context.project.spec.materialize.cache
    manifest = DatasetManifest.model_validate(output)
    if cache != "disk":
        gone = cache == "memory" and context.will_train
        return "rows of cache: memory live only as long as the attempt that prepared them" if gone else None
    try:
        damaged = damaged_shards(context.project.storage, manifest, deep=context.deep)
    except DataError as error:
        return error.message
    if context.project.storage.read_record(manifest_path(manifest.key), DatasetManifest) is None:
        return "its manifest is missing or damaged"  # `open_feed` and `clean` read that one
    if damaged:
        return f"{len(damaged)} of its shards are missing or damaged, the first is {damaged[0].path}; they are made again"
    return None


def _materialize_facts(output: dict[str, Any]) -> Facts:
    manifest = DatasetManifest.model_validate(output)
    shards, size = manifest.num_shards, sum(manifest.table.size_bytes.values())
    return (
        ("rows", ", ".join(f"{split} {manifest.rows[split]:,}" for split in SPLITS if manifest.rows.get(split))),
        *((("rows left out", manifest.rows_left_out),) if manifest.rows_left_out else ()),
        *((("classes", classes),) if (classes := classes_text(manifest)) else ()),
        ("columns", ", ".join(map(str, manifest.feed_schema.columns))),
        ("shards", f"{shards:,} in {counted(manifest.units, 'unit')}, {size / 1e6:,.1f} MB" if shards else "none on disk"),
        ("content digest", manifest.content_digest),
        *(("rows in two splits", str(found)) for found in _shared(manifest)),  # last: a warning has them, too
    )


def _show(ctx: RunContext, output: dict[str, Any]) -> None:
    manifest, spec, tracker = DatasetManifest.model_validate(output), ctx.project.spec.data, ctx.tracker
    is_shown = manifest.key in ctx.shown
    data = RunData(ctx.snapshot, manifest, (None if is_shown else ctx.ledger.profile(manifest.key)) or Profile())
    for split in () if is_shown else (*SPLITS, *spec.datasets):
        if manifest.rows.get(split):
            source = spec.place(split)
            tracker.log_dataset(
                manifest,
                split,
                name=dataset_name(ctx.run.pipeline, split),
                uri=source if isinstance(source, str) else spec.train,
                profile=data.split_profile(split),
            )
    uri = ctx.storage.uri(f"datasets/{manifest.key}") if manifest.num_shards else spec.train  # for `open_feed`
    facts = {"digest": manifest.content_digest, "rows": dict(manifest.rows), "uri": uri}
    tracker.set_tags({f"penstock.data.{name}": value for name, value in facts.items()})
    tracker.log_json("manifest.json", output)
    indent = 1 if len(ctx.snapshot.files) <= MAX_FILES else None
    tracker.log_text("data/files.json", json.dumps(data.files, indent=indent, ensure_ascii=False))  # redacted once, as text
    if not is_shown:
        tracker.log_json("data/profile.json", data.profile.model_dump(mode="json"))
    tracker.log_json("data/fitted.json", ctx.fitted.model_dump(mode="json", exclude_none=True))
    if spec.invalid == "drop":
        tracker.log_metrics({"data/rows_left_out": float(sum(manifest.extra["dropped"].values()))}, 0)


READ = Stage("read", _read, _read_facts)

PREPROCESS = Stage("preprocess", _preprocess, lambda output: (("transforms", f"{len(output['steps'])}"),))

MATERIALIZE = Stage("materialize", _materialize, _materialize_facts, _verify, publish=_show)
