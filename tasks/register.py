"""The register stage: the model under its name, with signature, input example, lineage and alias."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingest.order import make_order
from ingest.spec import ShuffleSpec
from tasks.context import Outcome, RunContext
from tasks.evaluate import model_checkpoint
from tasks.stage import Facts, Look, Stage, stage_task
from tasks.train import make_job, trusted_checkpoint
from training.feeds import open_job_feed
from training.register import register_model, version_exists

__all__ = ["STAGE", "register"]

EXAMPLE_ROWS = 4


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    spec = ctx.project.spec
    name = spec.register_.name or spec.name
    checkpoint = trusted_checkpoint(ctx.project, ctx.work_storage, model_checkpoint(ctx))
    manifest = ctx.manifest
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder, "model.safetensors")
        checkpoint.storage.get_file("model.safetensors", weights)
        registered = register_model(
            ctx.tracker,
            name=name,
            alias=spec.register_.alias,
            key=ctx.keys["register"].key,
            weights_path=weights,
            code=ctx.project.recipe,
            params=spec.train.params,
            schema=manifest.feed_schema,
            fitted_json=ctx.output("preprocess"),
            example=_example(ctx),
            tags={
                "penstock.run": ctx.run.run,
                "penstock.checkpoint": checkpoint.name,
                "penstock.weights_digest": checkpoint.manifest.weights_digest,
                "penstock.data.digest": manifest.content_digest,
                "penstock.data.uri": ctx.storage.uri(f"datasets/{manifest.key}") if manifest.shards else spec.data.train,
                "penstock.code": ctx.project.recipe.digest,
            },
        )
    return {**registered.model_dump(mode="json"), "tracking_uri": ctx.tracker.tracking_uri}, "ran"


def _example(ctx: RunContext) -> dict[str, Any]:
    """The first rows of the train split, without the label."""
    manifest = ctx.manifest
    as_stored = make_order(ShuffleSpec(mode="none"), manifest.rows["train"])
    feed = open_job_feed(replace(make_job(ctx), order=as_stored), "train", 0, 1)
    first = next(feed.batches(0))
    return {c.name: first.columns[c.name][:EXAMPLE_ROWS].numpy().copy() for c in manifest.feed_schema.features}


def _distrust(look: Look, output: dict[str, Any]) -> str | None:
    if not version_exists(output["tracking_uri"], output["name"], output["version"]):
        return f"version {output['version']} of model {output['name']} is no longer in the registry"
    return None


def _facts(output: dict[str, Any]) -> Facts:
    return (("model", output["uri"]), ("alias", str(output.get("alias"))))


STAGE = Stage("register", _run, _distrust, _facts, of_run=True)
register = stage_task(STAGE)
