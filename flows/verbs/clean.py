"""What does `penstock clean` free? What nothing that is kept refers to in the storage, and old code folders on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from penstock.flows.run.retention import (
    aliased_models,
    cleaned_by,
    free_flow_runs,
    free_tracked,
    going_text,
    tracked_files,
    tracked_text,
)
from penstock.flows.servers.prefect_server import ServerFiles
from penstock.flows.servers.services import prefect_api
from penstock.flows.spec_file import LoadedSpec, load_spec
from penstock.messages import counted
from penstock.redact import redact_text
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.room.free import Cleaning, clean
from penstock.tasks.room.plan import Going, RoomPlan
from penstock.tasks.room.spec import RetentionSpec
from penstock.temporary import remove_unowned, unowned
from penstock.usercode.package import code_folders

__all__ = ["clean_pipeline"]

_OTHERS = {"mlflow": "MLflow keeps runs, artifacts and models", "prefect": "Prefect keeps flow runs"}
"""Folders beside the pipeline file that are not penstock's own."""


def clean_pipeline(
    file: Path, keep_runs: int | None, keep_days: float | None, *, dry_run: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Free room, and return what `penstock clean --json` prints.

    Args:
        keep_runs: None takes the file's `retention`, or else the default; `keep_days` likewise.
        say: hears a line at a time; what is freed is said before it is.

    Raises:
        LeaseHeldError: another cleaning is at work.
        ResumeError: the record of a run cannot be read.
        ServiceError: the model registry does not answer, so that nobody knows which models have an alias.
    """
    loaded = load_spec(file)
    ledger = Ledger(Storage(loaded.spec.storage))
    given = {name: value for name, value in (("keep_runs", keep_runs), ("keep_days", keep_days)) if value is not None}
    kept = (loaded.spec.retention or RetentionSpec()).model_dump() | given
    cleaning = Cleaning(
        ledger=ledger,
        pipeline=loaded.spec.name,
        retention=RetentionSpec.model_validate(kept),
        aliased=aliased_models(ledger, loaded.spec.name, loaded.state_dir),
        by=cleaned_by("penstock clean"),
    )
    plan = cleaning.plan()
    folders = unowned(code_folders())

    def tell(plan: RoomPlan) -> None:
        for line in _lines(plan, folders, loaded, dry_run):
            say(line)

    going = plan.going
    if dry_run:
        tell(plan)
    else:
        going = clean(cleaning, tell)
        remove_unowned(folders)
    # Of what was cleaned, which is less than what was announced if a run began to use some of it.
    tracked = (
        tracked_files(ledger, loaded.spec.name, loaded.state_dir, plan.names("run") if dry_run else ())
        if cleaning.retention.mlflow
        else []
    )
    if tracked:
        say(f"{'would free' if dry_run else 'frees'} {tracked_text(tracked)}")
    freed_mlflow = sum(run.size_bytes for run in tracked) if dry_run else free_tracked(ledger, loaded.state_dir, tracked)
    flow_runs = 0 if dry_run else _free_flow_runs(cleaning, loaded.state_dir, going, say)
    for line in _left(loaded):
        say(line)
    if not dry_run:
        say(f"freed {going_text(going)}" if going else "nothing was freed in the storage")
    return {
        "status": "done",
        "storage": redact_text(loaded.spec.storage),
        "pipeline": loaded.spec.name,
        "dry_run": dry_run,
        **cleaning.retention.model_dump(),
        "kept": [{"run": run, "why": why} for run, why in sorted(plan.kept.items())],
        "freed": [_described(each) for each in going],
        "freed_bytes": sum(each.size_bytes for each in going),
        "freed_mlflow_bytes": freed_mlflow,
        "freed_flow_runs": flow_runs,
        "code_folders": [str(folder) for folder in folders],
    }


def _free_flow_runs(cleaning: Cleaning, state_dir: Path, going: Iterable[Going], say: Callable[[str], None]) -> int:
    """Delete what the embedded Prefect server keeps of runs that are cleaned. It is started for it, so only where runs go."""
    runs = [each for each in going if each.kind == "run"]
    if not runs or os.environ.get("PREFECT_API_URL") or not ServerFiles(state_dir).database.exists():
        return 0
    with prefect_api(state_dir):
        freed = free_flow_runs(cleaning.ledger, cleaning.pipeline, state_dir)
    if freed:
        say(f"freed {counted(freed, 'flow run')} of Prefect's")
    return freed


def _lines(plan: RoomPlan, folders: Iterable[Path], loaded: LoadedSpec, dry_run: bool) -> Iterable[str]:
    """What stays and why, and what goes and why."""
    for run, why in sorted(plan.kept.items()):
        yield f"stays  {run}: {why}"
    for each in plan.going:
        if each.kind == "run":
            yield f"goes   {each.name}: {each.why}, {each.size_bytes / 1e6:,.1f} MB; its records stay"
    for folder in folders:
        yield f"goes   {folder}: code of a process that is gone"
    if plan.going:
        yield f"{'would free' if dry_run else 'frees'} {going_text(plan.going)}"
    elif dry_run:
        yield "nothing in the storage would be freed"


def _left(loaded: LoadedSpec) -> Iterable[str]:
    for name, what in _OTHERS.items():
        others = sum(Storage(str(loaded.state_dir)).tree(name).values())
        if others:
            yield f"left   {loaded.state_dir / name}: {others / 1e6:,.1f} MB; {what} there"


def _described(going: Going) -> dict[str, Any]:
    return {"kind": going.kind, "name": going.name, "bytes": going.size_bytes, "why": going.why}
