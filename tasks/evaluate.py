"""The evaluate stage: how good is the model on held-out rows?"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import torch

from penstock.ingest.materialize.provenance import sources_of
from penstock.ingest.schema import SPLITS, Split
from penstock.messages import counted
from penstock.storage import Storage
from penstock.tasks.context import Outcome, RunContext
from penstock.tasks.model.held_out import HeldOut, held_out_of, slices_of
from penstock.tasks.stage import Facts, Stage
from penstock.tasks.train import chosen_checkpoint, make_job, model_spec, other_weights, trusted_checkpoint
from penstock.training.evaluation.evaluate import EvaluationResult
from penstock.training.evaluation.evaluate import evaluate as evaluate_model
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.model import ModelSpec, load_model

__all__ = ["STAGE", "measure_checkpoint", "model_checkpoint"]

DRAIN_S = 10.0
"""How long the stage waits for its figures to reach the tracking server before it counts as done."""


def model_checkpoint(ctx: RunContext) -> str:
    """Name the checkpoint whose weights are evaluated and registered."""
    return chosen_checkpoint(TrainOutcome.model_validate(ctx.output("train")))


def _run(ctx: RunContext) -> tuple[dict[str, Any], Outcome]:
    spec, rows = ctx.project.spec, ctx.manifest.rows
    best = spec.train.checkpoint.best
    splits: list[Split] = [split for split in SPLITS[1:] if rows.get(split)]
    checkpoint = trusted_checkpoint(ctx.project, ctx.work_storage, model_checkpoint(ctx))
    measure = partial(
        measure_held_out,
        held_out_of(ctx),
        spec.evaluate.slices,
        make_job(ctx),
        model_spec(ctx),
        checkpoint.storage,
        splits=splits,
        metrics=spec.evaluate.metrics,
    )
    if ctx.on_cluster:
        from penstock.training.on_ray.one_worker import on_one_worker  # it loads Ray

        ctx.need_ray()
        measured = on_one_worker(spec.train, "evaluate", measure, ctx.reporter.report, has_trained=True)
    else:
        measured = measure(progress=ctx.reporter.progress("evaluate"))
    result = measured.result
    for warning in measured.warnings:
        ctx.warn(warning)
    for name, table in result.tables.items():
        ctx.tracker.log_json(f"evaluation/{name}.json", table)
    metrics = {name: value for name, value in result.metrics.items() if math.isfinite(value)}
    for name in sorted(result.metrics.keys() - metrics.keys()):
        why = f"not defined: {result.undefined[name]}" if name in result.undefined else f"{result.metrics[name]}"
        ctx.warn(f"evaluate: {name} is {why}; it is left out")
    for split, answers in measured.answers.items():
        ctx.ledger.save_answers(ctx.run.run, split, answers)
    if result.slices:
        ctx.tracker.log_text("evaluation/slices.csv", _csv(pa.Table.from_pylist(result.slices)))
    for name, figure in result.figures.items():
        ctx.tracker.log_figure(f"evaluation/{name}", figure)
        ctx.work_storage.write_bytes(f"figures/{name}", figure)
    output = {
        "metrics": metrics,
        "not_defined": result.undefined,
        "step": checkpoint.manifest.step,
        "best_by": best.metric if best is not None else None,
        "slices": result.slices,
        "figures": sorted(result.figures),
        "checkpoint": checkpoint.name,
        "weights_digest": ctx.output("train")["weights_digest"],
    }
    if ctx.attempt.number > 1:  # the labels may have been corrected since
        _show(ctx, output, again=True)
    ctx.tracker.log_json("evaluation/metrics.json", output)
    ctx.tracker.drain(DRAIN_S)
    return output, "ran"


class Measured(NamedTuple):
    """Results of measuring. Picklable."""

    result: EvaluationResult
    answers: dict[Split, pa.Table]
    """The model's answer on each row, with the file and row it came from."""
    warnings: list[str]


def measure_held_out(
    held_out: HeldOut,
    slices: Sequence[str | Mapping[str, Sequence[float]]],
    job: TrainJob,
    model: ModelSpec,
    files: Storage,
    *,
    splits: Sequence[Split],
    **options: Any,
) -> Measured:
    """Measure in this process, which also reads the source's rows that slices go by and where each row came from."""
    warnings: list[str] = []
    sliced = {split: slices_of(held_out, split, slices, warnings.append) for split in splits} if slices else {}
    result = measure_checkpoint(job, model, files, splits=splits, slices=sliced, **options)
    answers = {split: _with_sources(held_out, split, columns) for split, columns in result.rows.items() if columns}
    return Measured(result, answers, warnings)


def _with_sources(held_out: HeldOut, split: Split, columns: dict[str, np.ndarray]) -> pa.Table:
    """Add to the answers the file and row of each, if the shards are kept."""
    table = pa.table(columns)
    if held_out.manifest.num_shards:
        found = sources_of(held_out.storage, held_out.manifest, split, columns["id"])
        names = pa.array([f"{held_out.location(split)}/{name}" for name in found.names], pa.string())
        table = table.append_column("file", pa.DictionaryArray.from_arrays(pa.array(found.files), names))
        table = table.append_column("row", pa.array(found.rows))
    return table


def _csv(table: pa.Table) -> str:
    into = io.BytesIO()
    pa_csv.write_csv(table, into)
    return into.getvalue().decode()


def measure_checkpoint(
    job: TrainJob, model: ModelSpec, files: Storage, *, splits: Sequence[Split], **options: Any
) -> EvaluationResult:
    """Measure in this process, with as many threads as a training worker has."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, int(job.spec.cpus_per_worker)))
    try:
        return evaluate_model(job, load_model(model, files), splits=splits, **options)
    finally:
        torch.set_num_threads(before)


def _show(ctx: RunContext, output: dict[str, Any], *, again: bool = False) -> None:
    # In every attempt: a kill right after the stage must not lose its numbers. The tracker drops what is there already.
    last = ctx.output("train")["step"]
    for name, value in output["metrics"].items():
        # Validation has been charted while training. A page shows the newest value: let it be that of the model that was kept.
        after = name.startswith("val/") and output["step"] < last
        ctx.tracker.log_metrics({name: value}, last + 1 if after else output["step"], again=again)


def _facts(output: dict[str, Any]) -> Facts:
    metrics = ((name, f"{value:.4f}") for name, value in sorted(output["metrics"].items()))
    chosen = f", best by {output['best_by']}" if output["best_by"] else ""
    undefined = ((name, f"not defined: {why}") for name, why in output.get("not_defined", {}).items())
    slices = ((f"{each['split']} where {each['slice']}", _measured(each)) for each in output.get("slices", []))
    return ("of step", f"{output['step']:,}{chosen}"), *metrics, *undefined, *slices


def _measured(entry: Mapping[str, Any]) -> str:
    values = [f"{name} {value:.4f}" for name, value in entry.items() if isinstance(value, float)]
    undefined = [f"not defined: {why}"] if (why := entry.get("not_defined")) else []
    return f"{counted(entry['rows'], 'row')}: {', '.join([*values, *undefined])}"


STAGE = Stage("evaluate", _run, _facts, other_weights, of_run=True, publish=_show)
