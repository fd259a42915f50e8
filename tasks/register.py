"""The register stage: the model under its name, with signature, input example, lineage and alias."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.digest import digest_of
from penstock.ingest.feed.lists import batch_rows_of, padded_of
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.redact import redact_text
from penstock.tasks.context import Outcome, RunContext
from penstock.tasks.evaluate import model_checkpoint
from penstock.tasks.ledger import Ledger
from penstock.tasks.stage import Facts, Stage, VerifyContext
from penstock.tasks.train import make_job, model_spec, other_weights, trusted_checkpoint
from penstock.training.open_feeds import open_job_feed
from penstock.training.registry.registry import TrainedVersion

__all__ = ["STAGE"]

EXAMPLE_ROWS = 4


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    spec = ctx.project.spec
    name = spec.register_.name or spec.name
    if spec.register_.alias is not None:
        ctx.ledger.note_alias(ctx.run, name, spec.register_.alias)
    checkpoint = trusted_checkpoint(ctx.project, ctx.work_storage, model_checkpoint(ctx))
    manifest = ctx.manifest
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ctx.project.framework.model_files]
        for file in files:
            checkpoint.storage.get_file(file.name, file)
        trained = TrainedVersion(
            name=name,
            alias=spec.register_.alias,
            # The same key can come to other weights: when the last checkpoint was lost and trained again with other workers.
            key=digest_of([ctx.keys["register"].key, checkpoint.manifest.weights_digest]),
            model=model_spec(ctx),
            files=files,
            example=_example(ctx),
            tags={
                "penstock.run": ctx.run.run,
                "penstock.checkpoint": checkpoint.name,
                "penstock.weights_digest": checkpoint.manifest.weights_digest,
                "penstock.data.digest": manifest.content_digest,
                "penstock.data.uri": ctx.storage.uri(f"datasets/{manifest.key}") if manifest.shards else spec.data.train,
                "penstock.code": ctx.project.recipe.digest,
            },
            experiment=spec.name,
            run_name=ctx.run.run,
        )
        registry = ctx.project.registry
        uri = registry.default_uri(ctx.state_dir)
        registered = registry.register(uri, trained, ctx.tracker)
    ctx.tracker.set_tags({"penstock.model": registered.uri})
    return {
        **registered.model_dump(mode="json"),
        "tracking_uri": redact_text(uri),
        "weights_digest": checkpoint.manifest.weights_digest,
    }, "ran"


def _example(ctx: RunContext) -> dict[str, Any]:
    """The first rows of the train split, without the label."""
    manifest = ctx.manifest
    as_stored = make_order(ShuffleSpec(mode="none"), manifest.rows["train"])
    feed = open_job_feed(replace(make_job(ctx), order=as_stored), "train", 0, 1, torch.device("cpu"))
    first = next(feed.batches(0))
    rows = batch_rows_of(first.columns, 0, min(EXAMPLE_ROWS, first.rows), manifest.feed_schema.packed)
    example: dict[str, Any] = {}
    for column in manifest.feed_schema.features:
        tensors = padded_of(column, rows) if column.ragged else {column.name: rows[column.name]}
        example |= {name: tensor.numpy().copy() for name, tensor in tensors.items()}
    return example


def _verify(context: VerifyContext, output: dict[str, Any]) -> str | None:
    registry = context.project.registry
    missing = registry.missing(registry.default_uri(context.state_dir), output) or other_weights(context, output)
    if missing is not None or output["alias"] is None:
        return missing
    # Only what penstock moved is moved back: a person who gave the alias to another version keeps it there.
    newest = Ledger(context.project.storage).run_with_alias(context.project.spec.name, output["name"], output["alias"])
    if newest in (None, context.run_id):
        return None
    return f"run {newest} has given alias {output['alias']!r} to its own version since"


def _facts(output: dict[str, Any]) -> Facts:
    return (("model", output["uri"]), ("alias", str(output.get("alias"))))


STAGE = Stage("register", _run, _verify, _facts, of_run=True)
