"""Delete data of the storage that nothing kept refers to, and old code folders on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from penstock.flows.retention.apply import aliased_models, format_actor, format_deletions
from penstock.flows.spec_file import load_spec
from penstock.redact import redact_text
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.retention.clean import Cleaning
from penstock.tasks.retention.plan import CleanupPlan
from penstock.tasks.retention.spec import RetentionSpec

__all__ = ["clean_pipeline"]


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
    loaded = load_spec(file)
    ledger = Ledger(Storage(loaded.spec.storage))
    given = {name: value for name, value in (("keep_runs", keep_runs), ("keep_days", keep_days)) if value is not None}
    cleaning = Cleaning(
        ledger=ledger,
        pipeline=loaded.spec.name,
        retention=RetentionSpec.model_validate((loaded.spec.retention or RetentionSpec()).model_dump() | given),
        aliased=aliased_models(ledger, loaded.spec.name, loaded.state_dir),
        by=format_actor("penstock clean"),
    )

    def announce(plan: CleanupPlan) -> None:
        for line in _plan_lines(plan, dry_run):
            report(line)

    if dry_run:
        announce(plan := cleaning.plan())
    else:
        plan = cleaning.clean(announce, lambda holder: report(f"waiting for another cleaning of the storage: {holder.process}"))
        report(f"freed {format_deletions(plan.deletions)}" if plan.deletions else "nothing was freed in the storage")
    return {
        "status": "done",
        "storage": redact_text(loaded.spec.storage),
        "pipeline": loaded.spec.name,
        "dry_run": dry_run,
        **cleaning.retention.model_dump(),
        "kept": [{"run": run, "why": why} for run, why in sorted(plan.kept.items())],
        "freed": [{"kind": each.kind, "name": each.name, "bytes": each.size_bytes, "why": each.why} for each in plan.deletions],
        "freed_bytes": sum(each.size_bytes for each in plan.deletions),
        "rows_stay": plan.rows_stay,
    }


def _plan_lines(plan: CleanupPlan, dry_run: bool) -> Iterable[str]:
    """Describe each run that stays and each deletion, with the reason."""
    for run, why in sorted(plan.kept.items()):
        yield f"stays  {run}: {why}"
    if plan.rows_stay:
        yield f"stays  prepared rows: {plan.rows_stay}"
    for each in plan.deletions:
        if each.kind == "run":
            yield f"goes   {each.name}: {each.why}, {each.size_bytes / 1e6:,.1f} MB; its records stay"
    if plan.deletions:
        yield f"{'would free' if dry_run else 'frees'} {format_deletions(plan.deletions)}"
    elif dry_run:
        yield "nothing in the storage would be freed"
