"""The materialize stage: prepared rows as an immutable cached dataset."""

from __future__ import annotations

from typing import Any

from ingest.dataset import DatasetManifest
from ingest.materialize import damaged_shards
from ingest.materialize import materialize as materialize_dataset
from tasks.context import Outcome, RunContext
from tasks.stage import Facts, Look, Stage, stage_task

__all__ = ["STAGE", "materialize"]


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    spec = ctx.project.spec
    ctx.need_ray()
    manifest = materialize_dataset(
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
    return manifest.model_dump(mode="json"), "ran"


def _distrust(look: Look, output: dict[str, Any]) -> str | None:
    damaged = damaged_shards(look.project.storage, DatasetManifest.model_validate(output), deep=look.deep)
    if damaged:
        return f"{len(damaged)} of its shards are missing or damaged, the first is {damaged[0].path}; they are made again"
    return None


def _facts(output: dict[str, Any]) -> Facts:
    manifest = DatasetManifest.model_validate(output)
    size = sum(shard.size_bytes for shard in manifest.shards)
    dropped = sum(unit.rows_dropped for unit in manifest.units)
    facts = (
        ("rows", ", ".join(f"{split} {rows:,}" for split, rows in manifest.rows.items())),
        ("columns", ", ".join(f"{c.name}: {c.dtype}{list(c.shape) if c.shape else ''}" for c in manifest.feed_schema.columns)),
        ("shards", f"{len(manifest.shards):,} in {len(manifest.units):,} units, {size / 1e6:,.1f} MB"),
        ("content digest", manifest.content_digest),
    )
    return (*facts, ("rows left out", f"{dropped:,}")) if dropped else facts


STAGE = Stage("materialize", _run, _distrust, _facts)
materialize = stage_task(STAGE)
