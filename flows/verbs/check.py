"""Check spec, sources, resources and one real batch through the recipe; run no stage."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from penstock.flows.preflight.checks import Preflight, check_cluster, check_named, check_recipe, check_storage
from penstock.flows.preflight.try_batch import try_one_batch
from penstock.flows.servers.probes import ray_address
from penstock.flows.servers.services import check_mlflow_answers, check_prefect_answers, prepare_environment, ray_cluster
from penstock.flows.spec_file import LoadedSpec
from penstock.flows.verbs.plan import OVERLAPS, describe_preparing, describe_workers, format_preparing, format_workers
from penstock.ingest.feed.batch import FeedShare
from penstock.ingest.read.snapshot import SourceSnapshot, read_source
from penstock.machine.prints import passing_prints
from penstock.messages import capped, counted
from penstock.plugins import optional
from penstock.progress import silent
from penstock.tasks.project import Project
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Ledger
from penstock.training.tracking.registry import TRACKERS

__all__ = ["check_pipeline"]

_SHOWN_COLUMNS = 20


def check_pipeline(loaded: LoadedSpec, report: Callable[[str], None]) -> dict[str, Any]:
    """Check everything that can be checked without running a stage.

    Raises:
        PenstockError: the first part that fails, with all its problems.
    """
    report(f"spec       ok   {loaded.file.name}, {counted(len(loaded.overrides), 'override')}")
    project = loaded.project
    preflight = Preflight(loaded)
    check_storage(project.storage)
    check_named(project)
    prepare_environment()
    check_prefect_answers()
    if loaded.spec.tracking.tracker == "mlflow":
        check_mlflow_answers()
    if servers := [name for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI") if os.environ.get(name)]:
        report(f"servers    ok   {', '.join(servers)}")
    warnings = [*preflight.resources]
    with ray_cluster(loaded.state_dir) if ray_address() is not None else nullcontext() as cluster:
        if cluster is None:
            _ = preflight.machine
        else:
            check_cluster(project, cluster, reads_sources=True)
            has = ((cluster.num_cpus, "CPU"), (cluster.num_gpus, "GPU"))
            words = [f"{count:g} {kind}{'s' * (count != 1)}" for count, kind in has]
            report(f"cluster    ok   {cluster.address}: {', '.join(words)}")
            if preparing := describe_preparing(project.spec, cluster):
                report(f"preparing  ok   {format_preparing(preparing)}")
        return _check_the_rest(loaded, project, warnings, report, on_cluster=cluster is not None)


def _check_the_rest(
    loaded: LoadedSpec, project: Project, warnings: list[str], report: Callable[[str], None], *, on_cluster: bool
) -> dict[str, Any]:
    report(f"storage    ok   {project.storage.root}")
    with passing_prints(lambda line: report(f"recipe: {line}")):
        check_recipe(project)
    TRACKERS.get(loaded.spec.tracking.tracker)
    ledger = Ledger(project.storage)
    keys = stage_keys(project, ledger.stage_output)  # loads the model registry, too
    report(f"recipe     ok   {loaded.spec.train.recipe or loaded.spec.train.framework}")
    describe_space = optional("penstock.flows.tune.space:describe_space")
    if describe_space is not None and (space := describe_space(loaded)):
        report(f"tune       ok   {space}")
    if variables := {place: None for code in project.codes for place in code.variables}:
        warnings.append(f"{', '.join(variables)}: reads environment variables, whose values no key covers")
    snapshot = read_source(project.source, project.files, silent)
    _check_one_step(project, snapshot)
    report(f"sources    ok   {counted(snapshot.rows, 'row')} in {counted(len(snapshot.files), 'file')}")
    ships: dict[str, int] = {}
    for code in project.codes:
        ships |= code.shipped
    report(f"ships      ok   {', '.join(f'{name} ({size:,} bytes)' for name, size in sorted(ships.items())) or 'no code'}")
    batch = try_one_batch(project, snapshot, on_cluster=on_cluster, for_sweep=True, trains=True, report=report)
    warnings += filter(None, [batch.pop("one_class"), *batch["warnings"]])
    report(f"one batch  ok   {counted(batch['rows'], 'row')}, {_describe_model(batch, snapshot.rows)}")
    asks = batch["asks_for"]
    report(f"serving    ok   the registered model asks for {', '.join(capped(asks, _SHOWN_COLUMNS)) or 'no column'}")
    if begins_with := batch.get("begins_with"):
        report(f"start      ok   {begins_with}")
    if (trained := batch.get("trained")) and not trained["stuck"]:
        report(f"training   ok   {_describe_training(trained)}")
    for warning in warnings:
        report(f"warning: {warning}")
    if project.spec.overlaps:
        report(f"overlap    ok   {OVERLAPS}")
    workers = describe_workers(project, ledger.stage_output("materialize", keys["materialize"].key) or {})
    if workers is not None:
        report(f"workers    ok   {format_workers(workers)}")
    counts = {"rows": snapshot.rows, "files": len(snapshot.files)}
    return {"status": "done", **counts, "workers": workers, "ships": ships, "batch": batch, "warnings": warnings}


def _describe_model(batch: dict[str, Any], rows: int) -> str:
    """Describe the loss and the number of parameters, and why a run may have more."""
    if not batch["parameters"] and batch["loss"] is None:
        return "prepared"
    loss = "no loss that is a number" if batch["loss"] is None else f"loss {batch['loss']:.4g}"
    loss += " (perhaps the rows tried are of one class)" if batch["loss"] == 0 else ""
    described = f"{loss}, {counted(batch['parameters'], 'parameter')}"
    if not batch["sized_by_sample"]:
        return described
    sizing = " and ".join(dict.fromkeys(batch["sized_by_sample"]))
    return f"{described} by a sample of {batch['sample_rows']:,} rows; {sizing} may find more categories in all {rows:,}"


def _describe_training(trained: dict[str, Any]) -> str:
    """Describe the batches that were tried, the reported values and the checkpoint."""
    batches = "2 steps" if trained["batches"] is None else counted(trained["batches"], "batch", "batches")
    names = [name for name in trained["reported"] if not name.endswith(("_s", "train/lr"))]
    reported = f"reported {', '.join(names)}" if names else "nothing was reported"
    size = trained["checkpoint_bytes"]
    saved = f"a checkpoint of {size:,} bytes was saved and loaded" if size else "no checkpoint was saved by then"
    return f"{batches}; {reported}; {saved}"


def _check_one_step(project: Project, snapshot: SourceSnapshot) -> None:
    """Refuse `last_batch: drop` with fewer rows than one batch: no step would be made."""
    train, counts = project.spec.train, [file.rows for file in snapshot.files if file.location == "train"]
    if train.last_batch != "drop" or None in counts or project.spec.shuffle.sample is not None:
        return
    FeedShare(train.batch_rows, last="drop").positions(sum(count or 0 for count in counts))
