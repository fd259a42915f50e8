"""Delete data of the storage that nothing kept refers to: by `penstock clean`, and when a run is done."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from penstock.errors import LeaseHeldError, PenstockError
from penstock.flows.spec_file import load_spec
from penstock.messages import counted
from penstock.redact import redact_text
from penstock.storage import Storage
from penstock.tasks.context import RunContext
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.retention.clean import Cleaning
from penstock.tasks.retention.plan import CleanupPlan, Deletion
from penstock.tasks.retention.spec import RetentionSpec
from penstock.training.registry.registry import REGISTRIES
from penstock.training.spec import TrackingSpec

__all__ = ["apply_retention", "clean_pipeline"]


def clean_pipeline(
    file: Path, keep_runs: int | None, keep_days: float | None, *, dry_run: bool, report: Callable[[str], None]
) -> dict[str, Any]:
    """Delete what nothing kept refers to, and return what `penstock clean --json` prints.

    Args:
        keep_runs: None takes the file's `retention`, or else the default; `keep_days` likewise.
        report: prints a line; deletions are printed before they happen.

    Raises:
        LeaseHeldError: a sweep of the pipeline runs, or a run begins.
        ResumeError: the record of a run cannot be read.
        ServiceError: the model registry does not answer, so the aliased models are not known.
    """
    given = [f"retention.{n}={value}" for n, value in (("keep_runs", keep_runs), ("keep_days", keep_days)) if value is not None]
    loaded = load_spec(file, given)
    ledger = Ledger(Storage(loaded.spec.storage))
    cleaning = Cleaning(
        ledger=ledger,
        pipeline=loaded.spec.name,
        retention=loaded.spec.retention or RetentionSpec(),
        aliased=_aliased_models(ledger, loaded.spec.name, loaded.state_dir),
        by=f"penstock clean on {socket.gethostname()}",
    )

    def announce(plan: CleanupPlan) -> None:
        for run, why in sorted(plan.kept.items()):
            report(f"stays  {run}: {why}")
        if plan.rows_stay:
            report(f"stays  prepared rows: {plan.rows_stay}")
        for each in plan.deletions:
            if each.kind == "run":
                report(f"goes   {each.name}: {each.why}, {each.size_bytes / 1e6:,.1f} MB; its records stay")
        report(f"{'would free' if dry_run else 'frees'} {_format_deletions(plan.deletions)}")

    if dry_run:
        announce(plan := cleaning.plan())
    else:
        plan = cleaning.clean(announce, report)
    return {
        "status": "done",
        "storage": redact_text(loaded.spec.storage),
        "pipeline": loaded.spec.name,
        "dry_run": dry_run,
        **cleaning.retention.model_dump(),
        "kept": [{"run": run, "why": why} for run, why in sorted(plan.kept.items())],
        "freed": [{"kind": each.kind, "name": each.name, "bytes": each.size_bytes, "why": each.why} for each in plan.deletions],
        "freed_bytes": plan.size_bytes,
        "rows_stay": plan.rows_stay,
    }


def apply_retention(ctx: RunContext) -> dict[str, int]:
    """Delete what the section `retention` does not keep, and return the bytes. An error is a warning."""
    retention, pipeline = ctx.project.spec.retention, ctx.run.pipeline
    if retention is None:
        return {}

    def report(line: str) -> None:
        ctx.reporter.report(f"retention: {line}")

    def announce(plan: CleanupPlan) -> None:
        if plan.deletions:
            report(f"frees {_format_deletions(plan.deletions)}")
        if plan.rows_stay:
            report(f"prepared rows stay: {plan.rows_stay}")

    try:
        aliased = _aliased_models(ctx.ledger, pipeline, ctx.state_dir)
        cleaning = Cleaning(ctx.ledger, pipeline, retention, aliased, by=f"retention of run {ctx.run.run}")
        return {"freed_bytes": cleaning.clean(announce, report).size_bytes}
    except LeaseHeldError as error:
        report(f"nothing is freed now; the next run tries again: {error.message}")
    except (PenstockError, OSError) as error:
        ctx.reporter.warn(f"retention: nothing more is freed: {error}")
    return {"freed_bytes": 0}


def _aliased_models(ledger: Ledger, pipeline: str, state_dir: Path) -> dict[str, str]:
    """Return version, as `models:/name/3` -> its alias, of the models that the pipeline's runs registered.

    Raises:
        ServiceError: the registry does not answer.
        PreflightError: the package of a registry cannot be imported.
    """
    models: set[tuple[str, str]] = set()
    for run in ledger.runs():
        uri = str(run.result.get("model_uri") or "")
        if run.pipeline == pipeline and uri.startswith("models:/"):
            registry = run.spec.get("tracking", {}).get("registry", TrackingSpec().registry)
            models.add((registry, uri.removeprefix("models:/").rpartition("/")[0]))
    found: dict[str, str] = {}
    for registry, name in sorted(models):
        backend = REGISTRIES.get(registry)
        look_up = getattr(backend, "aliases", None)  # a registry of another package may have none
        aliases = look_up(backend.default_uri(state_dir), name) if look_up is not None else {}
        found |= {f"models:/{name}/{version}": f"{name}@{alias}" for alias, version in aliases.items()}
    return found


def _format_deletions(deletions: Collection[Deletion]) -> str:
    """Format `1.2 MB: 3 runs 1.0 MB, 2 units 0.2 MB`, or `nothing in the storage`."""
    sizes: dict[str, list[int]] = {}
    for each in deletions:
        sizes.setdefault(each.kind, []).append(each.size_bytes)
    parts = [f"{counted(len(of), kind)} {sum(of) / 1e6:,.1f} MB" for kind, of in sizes.items()]
    return f"{sum(map(sum, sizes.values())) / 1e6:,.1f} MB: {', '.join(parts)}" if parts else "nothing in the storage"
