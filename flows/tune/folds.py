"""How does a pipeline do on each of its folds? A sweep over `data.fold`, whose end is one table instead of a best trial."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from penstock.errors import SpecError, TrainingError
from penstock.flows.spec_file import LoadedSpec, as_override, load_spec
from penstock.tasks.context import RunContext
from penstock.tasks.tune.record import Trial

__all__ = ["finish_folds", "with_folds"]


def with_folds(loaded: LoadedSpec) -> LoadedSpec:
    """Return the same pipeline with a sweep over its folds in place of its own.

    Raises:
        SpecError: it has no folds.
    """
    spec = loaded.spec
    if spec.data.folds is None:
        raise SpecError(
            f"{loaded.file.name} has no data.folds, the number of folds that the rows are dealt into",
            next_step=f"penstock run {loaded.file} --folds --set data.folds=5",
        )
    best = spec.train.checkpoint.best
    metric, mode = ("val/loss", "min") if best is None else (best.metric, best.mode)
    sweep: dict[str, Any] = {"searcher": "grid", "space": {"data.fold": {"grid": list(range(spec.data.folds))}}}
    if spec.tune is not None and spec.tune.concurrent is not None:
        sweep["concurrent"] = spec.tune.concurrent
    return load_spec(loaded.file, [*loaded.overrides, as_override("tune", {**sweep, "metric": metric, "mode": mode})])


def finish_folds(ctx: RunContext, trials: Sequence[Trial]) -> dict[str, Any]:
    """Show the metrics of all folds, their mean and standard deviation; what `penstock run --folds --json` prints.

    Raises:
        TrainingError: a fold was not trained to its end.
    """
    lost = [trial for trial in trials if trial.state != "done"]
    if lost:
        raise TrainingError(
            f"{len(lost)} of {len(trials)} folds did not come to their end",
            problems=[f"fold {trial.values['data.fold']}: {trial.error or trial.note or trial.state}" for trial in lost],
            next_step="correct what is wrong and run the same command: folds that are done are not trained again",
        )
    shared = [name for name in trials[0].metrics if all(name in trial.metrics for trial in trials)]
    names = [name for name in shared if name.startswith("val/")]
    values = {name: [trial.metrics[name] for trial in trials] for name in names}
    means = {name: statistics.fmean(found) for name, found in values.items()}
    deviations = {f"{name}_std": statistics.stdev(found) for name, found in values.items()}
    for line in _table(names, trials, means, deviations):
        ctx.reporter.report(line)
    folds = [
        {
            "fold": trial.values["data.fold"],
            "run": trial.run,
            "tracked_run": trial.tracked_run,
            "metrics": trial.metrics,
            "weights_digest": trial.weights_digest,
        }
        for trial in trials
    ]
    ctx.tracker.log_json("folds.json", {"folds": folds, "mean": means, "std": deviations})
    ctx.tracker.log_metrics(means | deviations, 0)
    described = ", ".join(f"{name} {means[name]:.4g} ± {deviations[f'{name}_std']:.2g}" for name in names)
    return {
        "status": "done",
        "sweep": ctx.run.run,
        f"{ctx.run.tracker}_run_id": ctx.tracker.run_id,
        "folds": folds,
        "metrics": means | deviations,
        "summary": f"{len(trials)} folds: {described}",
    }


def _table(names: Sequence[str], trials: Sequence[Trial], means: dict[str, float], deviations: dict[str, float]) -> list[str]:
    rows = [["fold", *names]]
    rows += [[str(trial.values["data.fold"]), *(f"{trial.metrics[name]:.4g}" for name in names)] for trial in trials]
    rows += [["mean", *(f"{means[name]:.4g}" for name in names)]]
    rows += [["std", *(f"{deviations[f'{name}_std']:.4g}" for name in names)]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
