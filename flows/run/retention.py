"""Which models of a pipeline have an alias, and what does a run that is done free?"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.flows.servers.prefect_server import ServerFiles
from penstock.messages import counted
from penstock.tasks.context import RunContext
from penstock.tasks.records.ledger import Ledger, Run
from penstock.tasks.room.free import Cleaning, clean
from penstock.tasks.room.plan import Going, RoomPlan
from penstock.training.registry.registries import REGISTRIES
from penstock.training.spec import TrackingSpec
from penstock.training.tracking.relocate_mlflow import mlflow_uri

if TYPE_CHECKING:
    from penstock.training.tracking.mlflow_files import OldRun

__all__ = [
    "aliased_models",
    "apply_retention",
    "cleaned_by",
    "free_flow_runs",
    "free_tracked",
    "going_text",
    "tracked_files",
    "tracked_text",
]

_KINDS = {"run": "run", "dataset": "dataset", "unit": "unit", "record": "record of stages"}


def aliased_models(ledger: Ledger, pipeline: str, state_dir: Path) -> dict[str, str]:
    """Version, as `models:/name/3` -> the alias it has now, of the models that the pipeline's runs registered.

    Raises:
        ServiceError: the registry does not answer, so that nobody knows.
        PreflightError: the package of a registry cannot be imported.
    """
    models: dict[tuple[str, str], set[str]] = {}
    for run in ledger.runs():
        uri = str(run.result.get("model_uri") or "")
        if run.pipeline == pipeline and uri.startswith("models:/"):
            registry = run.spec.get("tracking", {}).get("registry", TrackingSpec().registry)
            models.setdefault((registry, uri.removeprefix("models:/").rpartition("/")[0]), set()).add(uri)
    found: dict[str, str] = {}
    for registry, name in models:
        backend = REGISTRIES.get(registry)
        look_up = getattr(backend, "aliases", None)  # a registry of another package may have none
        aliases = look_up(backend.default_uri(state_dir), name) if look_up is not None else {}
        found |= {f"models:/{name}/{version}": f"{name}@{alias}" for alias, version in aliases.items()}
    return found


def tracked_files(ledger: Ledger, pipeline: str, state_dir: Path, going: Collection[str] = ()) -> list[OldRun]:
    """What MLflow keeps, in penstock's own folder, of runs of the pipeline that are cleaned.

    Args:
        going: runs that are about to be.

    Raises:
        ServiceError: MLflow's database cannot be read.
    """
    runs = ledger.runs()
    gone = [run for run in runs if run.pipeline == pipeline and (run.cleaned is not None or run.run in going)]
    ids = [run.tracking_runs["mlflow"] for run in gone if "mlflow" in run.tracking_runs]
    stay = [run for run in runs if run not in gone]
    kept = {str(run.result.get("model_uri")) for run in stay} | {str(_start_of(run)) for run in stay}
    if not ids:
        return []
    from penstock.training.tracking.mlflow_files import old_runs  # it loads MLflow

    return old_runs(mlflow_uri(state_dir), ids, kept)


def _start_of(run: Run) -> object:
    """The version whose weights a run began with: it is looked up again when the run continues."""
    return run.spec.get("train", {}).get("start_from")


def free_tracked(ledger: Ledger, state_dir: Path, old: Sequence[OldRun]) -> int:
    """Delete what `tracked_files` found; returns the bytes. Raises ServiceError or OSError."""
    if not old:
        return 0
    ids = {each.run_id for each in old if each.versions}
    for run in ledger.runs():
        # Before they go: a kill in between leaves a word too early, and the next cleaning makes it true.
        if run.tracking_runs.get("mlflow") in ids and not run.versions_deleted:
            ledger.save_run(run.model_copy(update={"versions_deleted": True}))
            ledger.storage.compress_record(f"runs/{run.run}/run.json")
    from penstock.training.tracking.mlflow_files import remove_files

    return remove_files(mlflow_uri(state_dir), old)


def free_flow_runs(ledger: Ledger, pipeline: str, state_dir: Path) -> int:
    """Delete what the embedded Prefect server, if this process uses it, keeps of runs that are cleaned; returns how many.

    Raises:
        ServiceError: it does not answer.
    """
    if not ServerFiles(state_dir).is_used_here:
        return 0
    gone = {run.run for run in ledger.runs() if run.pipeline == pipeline and run.cleaned is not None}
    if not gone:
        return 0
    from penstock.tasks.room.flow_runs import remove_flow_runs  # it loads Prefect, which `penstock clean` has not yet

    return remove_flow_runs(pipeline, gone)


def tracked_text(old: Sequence[OldRun]) -> str:
    """`MLflow's files of 3 runs, 2 versions: 1.2 MB`."""
    versions = sum(len(run.versions) for run in old)
    said = f", {counted(versions, 'version')}" if versions else ""
    return f"MLflow's files of {counted(len(old), 'run')}{said}: {sum(run.size_bytes for run in old) / 1e6:,.1f} MB"


def cleaned_by(what: str) -> str:
    """What a cleaned run says of who cleaned it."""
    try:
        return f"{what} of {getpass.getuser()} on {socket.gethostname()}"
    except (KeyError, OSError):  # an account without a name
        return f"{what} on {socket.gethostname()}"


def going_text(going: tuple[Going, ...]) -> str:
    """`1.2 MB: 3 runs 1.0 MB, 2 units 0.2 MB`."""
    parts = []
    for kind, name in _KINDS.items():
        sizes = [each.size_bytes for each in going if each.kind == kind]
        if sizes:
            many = "records of stages" if kind == "record" else None
            parts.append(f"{counted(len(sizes), name, many)} {sum(sizes) / 1e6:,.1f} MB")
    return f"{sum(each.size_bytes for each in going) / 1e6:,.1f} MB: {', '.join(parts)}"


def apply_retention(ctx: RunContext) -> dict[str, int]:
    """Free what the section `retention` lets go, and say how much. Trouble is a warning."""
    retention = ctx.project.spec.retention
    if retention is None:
        return {}

    def tell(plan: RoomPlan) -> None:
        if plan.going:
            ctx.reporter.say(f"retention: frees {going_text(plan.going)}")

    gone: tuple[Going, ...] = ()
    tracked = flow_runs = 0
    try:
        cleaning = Cleaning(
            ledger=ctx.ledger,
            pipeline=ctx.run.pipeline,
            retention=retention,
            aliased=aliased_models(ctx.ledger, ctx.run.pipeline, ctx.state_dir),
            by=f"retention of run {ctx.run.run}",
        )
        gone = clean(cleaning, tell)
        old = tracked_files(ctx.ledger, ctx.run.pipeline, ctx.state_dir) if retention.mlflow else []
        if old:
            ctx.reporter.say(f"retention: frees {tracked_text(old)}")
        tracked = free_tracked(ctx.ledger, ctx.state_dir, old)
        flow_runs = free_flow_runs(ctx.ledger, ctx.run.pipeline, ctx.state_dir)
    except (PenstockError, OSError) as error:
        ctx.reporter.warn(f"retention: nothing more is freed: {error}")
    freed = sum(each.size_bytes for each in gone)
    return {"freed_bytes": freed, "freed_mlflow_bytes": tracked, "freed_flow_runs": flow_runs}
