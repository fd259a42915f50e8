"""The materialize stage: prepared rows as an immutable cached dataset, in Ray's object store, or only counted and described."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import DataError
from penstock.ingest.dataset import SPLITS, DatasetManifest, Split
from penstock.ingest.materialize import damaged_shards
from penstock.ingest.materialize import materialize as materialize_dataset
from penstock.ingest.reader import shorten
from penstock.ingest.uncached import RowSource
from penstock.tasks.context import Outcome, RunContext
from penstock.tasks.stage import Facts, Look, Stage, stage_task
from penstock.training.feeds import MemoryFeeds, StreamFeeds
from penstock.training.job import FeedOpener

__all__ = ["STAGE", "feed_opener", "materialize"]

_CLASSES_NAMED = 10


def feed_opener(ctx: RunContext) -> FeedOpener | None:
    """How train, evaluate and register read the rows; None reads them from disk. Starts Ray where that needs it.

    Raises:
        DataError: rows that had to be prepared again for one of these stages came out differently.
    """
    cache = ctx.project.spec.materialize.cache
    if cache == "disk":
        return None
    ctx.need_ray()
    if ctx.open_feeds is None:
        if cache == "none":
            ctx.open_feeds = StreamFeeds(_source(ctx))
        elif _put(ctx).content_digest != ctx.manifest.content_digest:
            raise DataError(
                "the rows of cache: memory are gone with the attempt that prepared them, and they come out differently now",
                next_step="make the map_batches functions give the same result for the same rows, or use cache: disk",
            )
    return ctx.open_feeds


def _source(ctx: RunContext) -> RowSource:
    spec = ctx.project.spec
    return RowSource(
        spec.data, tuple(spec.preprocess), ctx.fitted, ctx.snapshot, dict(ctx.project.transforms), spec.materialize
    )


def _put(ctx: RunContext) -> DatasetManifest:
    manifest, datasets = _source(ctx).put(ctx.keys["materialize"].key, ctx.reporter.progress("materialize"))
    ctx.open_feeds = MemoryFeeds(datasets)
    return manifest


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    ctx.need_ray()
    if ctx.project.spec.materialize.cache == "disk":
        manifest = _put_on_disk(ctx)
    elif ctx.project.spec.materialize.cache == "memory":
        manifest = _put(ctx)
    else:
        manifest = _source(ctx).describe(ctx.keys["materialize"].key, ctx.reporter.progress("materialize"))
    if manifest.rows_left_out:
        ctx.warn(f"materialize: rows left out: {manifest.rows_left_out}")
    if unseen := manifest.extra.get("unseen_categories"):
        ctx.warn(f"materialize: one_hot made zeros of values that train does not have, rows by column: {unseen}")
    if untried := _untried_classes(manifest):
        ctx.warn(f"materialize: {untried}")
    return manifest.model_dump(mode="json"), "ran"


def _class_rows(manifest: DatasetManifest, split: Split) -> dict[int, int]:
    """Rows of each class of the split; nothing where the label is no class."""
    return {int(label): rows for label, rows in manifest.extra.get("class_counts", {}).get(split, {}).items()}


def _class_names(manifest: DatasetManifest, labels: Sequence[int]) -> list[str]:
    names = manifest.feed_schema.classes or ()
    return [shorten(names[label]) if label < len(names) else str(label) for label in labels]


def _untried_classes(manifest: DatasetManifest) -> str:
    """What to say of classes that only train has: a name that is misspelt in some rows looks like this."""
    train, *held_out = (_class_rows(manifest, split) for split in SPLITS)
    tried = {label for rows in held_out for label in rows}
    untried = sorted(train.keys() - tried, key=lambda label: (train[label], label))
    if not tried or not untried:
        return ""
    names = _class_names(manifest, untried[:_CLASSES_NAMED])
    named = [
        f"{name} ({train[label]:,} row{'s' if train[label] != 1 else ''})" for name, label in zip(names, untried, strict=False)
    ]
    label = manifest.feed_schema.label
    advice = "where one is another class misspelt" if manifest.feed_schema.classes else "where one is a mistake"
    quantity = "" if manifest.feed_schema.classes else f"; if {label!r} is a quantity, cast: {{{label}: float32}}"
    return (
        f"{len(untried):,} of {len(train):,} classes of {label!r} {'have' if len(untried) > 1 else 'has'} no row in validation "
        f"or test, so that no metric covers {'them' if len(untried) > 1 else 'it'}: {_some(named, len(untried))}; {advice}, "
        f"correct its rows at their source{quantity}"
    )


def _some(names: list[str], count: int) -> str:
    return ", ".join(names) + (f" and {count - len(names):,} more" if count > len(names) else "")


def _put_on_disk(ctx: RunContext) -> DatasetManifest:
    spec = ctx.project.spec
    return materialize_dataset(
        key=ctx.keys["materialize"].key,
        data=spec.data,
        steps=spec.preprocess,
        fitted=ctx.fitted,
        snapshot=ctx.snapshot,
        code=ctx.project.transforms,
        spec=spec.materialize,
        storage=ctx.storage,
        progress=ctx.reporter.progress("materialize"),
    )


def _distrust(look: Look, output: dict[str, Any]) -> str | None:
    cache = look.project.spec.materialize.cache
    if cache != "disk":
        gone = cache == "memory" and look.will_train
        return "rows of cache: memory live only as long as the attempt that prepared them" if gone else None
    damaged = damaged_shards(look.project.storage, DatasetManifest.model_validate(output), deep=look.deep)
    if damaged:
        return f"{len(damaged)} of its shards are missing or damaged, the first is {damaged[0].path}; they are made again"
    return None


def _facts(output: dict[str, Any]) -> Facts:
    manifest = DatasetManifest.model_validate(output)
    shards, size = len(manifest.shards), sum(shard.size_bytes for shard in manifest.shards)
    return (
        ("rows", ", ".join(f"{split} {manifest.rows[split]:,}" for split in SPLITS if manifest.rows.get(split))),
        *((("rows left out", manifest.rows_left_out),) if manifest.rows_left_out else ()),
        *((("classes", classes),) if (classes := _classes_text(manifest)) else ()),
        ("columns", ", ".join(map(str, manifest.feed_schema.columns))),
        ("shards", f"{shards:,} in {len(manifest.units):,} units, {size / 1e6:,.1f} MB" if shards else "none on disk"),
        ("content digest", manifest.content_digest),
    )


def _classes_text(manifest: DatasetManifest) -> str:
    """The classes of train, the largest first."""
    rows = _class_rows(manifest, "train")
    largest = sorted(rows, key=lambda label: (-rows[label], label))[:_CLASSES_NAMED]
    names = _class_names(manifest, largest)
    return _some([f"{name} {rows[label]:,}" for name, label in zip(names, largest, strict=True)], len(rows))


def _show(ctx: RunContext, output: dict[str, Any]) -> None:
    manifest = DatasetManifest.model_validate(output)
    ctx.tracker.log_dataset(manifest, name=ctx.run.pipeline, uri=ctx.project.spec.data.train)
    ctx.tracker.log_json("manifest.json", output)


STAGE = Stage("materialize", _run, _distrust, _facts, publish=_show)
materialize = stage_task(STAGE)
