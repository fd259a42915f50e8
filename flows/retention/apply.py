"""Find the aliased models of a pipeline, and delete old data when a run is done."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Collection
from pathlib import Path

from penstock.errors import LeaseHeldError, PenstockError
from penstock.lease import LeaseHolder
from penstock.messages import counted
from penstock.tasks.context import RunContext
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.retention.clean import Cleaning
from penstock.tasks.retention.plan import CleanupPlan, Deletion
from penstock.training.registry.registry import REGISTRIES
from penstock.training.spec import TrackingSpec

__all__ = ["aliased_models", "apply_retention", "format_actor", "format_deletions"]

_KINDS = {"run": "run", "dataset": "dataset", "unit": "unit", "record": "record of stages"}


def aliased_models(ledger: Ledger, pipeline: str, state_dir: Path) -> dict[str, str]:
    """Return version, as `models:/name/3` -> its alias, of the models that the pipeline's runs registered.

    Raises:
        ServiceError: the registry does not answer.
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


def format_actor(action: str) -> str:
    """Format `penstock clean of ann on host`."""
    try:
        return f"{action} of {getpass.getuser()} on {socket.gethostname()}"
    except (KeyError, OSError):  # an account without a name
        return f"{action} on {socket.gethostname()}"


def format_deletions(deletions: Collection[Deletion]) -> str:
    """Format `1.2 MB: 3 runs 1.0 MB, 2 units 0.2 MB`."""
    parts = []
    for kind, name in _KINDS.items():
        sizes = [each.size_bytes for each in deletions if each.kind == kind]
        if sizes:
            many = "records of stages" if kind == "record" else None
            parts.append(f"{counted(len(sizes), name, many)} {sum(sizes) / 1e6:,.1f} MB")
    return f"{sum(each.size_bytes for each in deletions) / 1e6:,.1f} MB: {', '.join(parts)}"


def apply_retention(ctx: RunContext) -> dict[str, int]:
    """Delete what the section `retention` does not keep, and return the bytes. An error is a warning."""
    retention, reporter = ctx.project.spec.retention, ctx.reporter
    if retention is None:
        return {}

    def announce(plan: CleanupPlan) -> None:
        if plan.deletions:
            reporter.report(f"retention: frees {format_deletions(plan.deletions)}")
        if plan.rows_stay:
            reporter.report(f"retention: prepared rows stay: {plan.rows_stay}")

    def on_wait(holder: LeaseHolder) -> None:
        reporter.report(f"retention: waiting for another cleaning of the storage: {holder.process}")

    try:
        cleaning = Cleaning(
            ledger=ctx.ledger,
            pipeline=ctx.run.pipeline,
            retention=retention,
            aliased=aliased_models(ctx.ledger, ctx.run.pipeline, ctx.state_dir),
            by=f"retention of run {ctx.run.run}",
        )
        done = cleaning.clean(announce, on_wait)
    except LeaseHeldError as error:
        reporter.report(f"retention: nothing is freed now; the next run tries again: {error.message}")
        return {"freed_bytes": 0}
    except (PenstockError, OSError) as error:
        reporter.warn(f"retention: nothing more is freed: {error}")
        return {"freed_bytes": 0}
    return {"freed_bytes": sum(each.size_bytes for each in done.deletions)}
