"""The evaluate stage: how good is the model on held-out rows?"""

from __future__ import annotations

from typing import Any

from tasks.context import Outcome, RunContext
from tasks.stage import Facts, Look, Stage, stage_task
from tasks.train import checkpoint_store
from training.evaluation import evaluate as evaluate_model
from training.trainer import TrainOutcome

__all__ = ["STAGE", "evaluate", "model_checkpoint"]


def model_checkpoint(ctx: RunContext) -> str:
    """Name of the checkpoint whose weights are evaluated and registered: the best one if the spec names a metric, else the last."""
    outcome = TrainOutcome.model_validate(ctx.output("train"))
    return outcome.best_checkpoint or outcome.checkpoint


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    spec = ctx.project.spec
    manifest = ctx.manifest
    splits = [split for split in ("validation", "test") if manifest.rows.get(split)]
    result = evaluate_model(
        manifest=manifest,
        storage=ctx.storage,
        code=ctx.project.recipe,
        spec=spec.train,
        weights=checkpoint_store(ctx.project, ctx.work_storage).model_file(model_checkpoint(ctx)),
        splits=splits,
        metrics=spec.evaluate.metrics,
        figures=spec.evaluate.figures,
        progress=ctx.reporter.progress("evaluate"),
    )
    step = TrainOutcome.model_validate(ctx.output("train")).step
    ctx.tracker.log_metrics(result.metrics, step)
    for name, figure in result.figures.items():
        ctx.tracker.log_figure(f"evaluation/{name}", figure)
    return {"metrics": result.metrics, "figures": sorted(result.figures), "checkpoint": model_checkpoint(ctx)}, "ran"


def _distrust(look: Look, output: dict[str, Any]) -> str | None:
    # Numbers are the output itself.
    return None


def _facts(output: dict[str, Any]) -> Facts:
    return tuple((name, f"{value:.4f}") for name, value in sorted(output["metrics"].items()))


STAGE = Stage("evaluate", _run, _distrust, _facts, of_run=True)
evaluate = stage_task(STAGE)
