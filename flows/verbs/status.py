"""List the runs of a storage, and repair their records in Prefect and at the tracker after kills."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.errors import CheckpointError, LeaseHeldError, ServiceError, SpecError
from penstock.flows.servers.services import prefect_api
from penstock.flows.spec_file import load_spec
from penstock.lease import LeaseHolder, current_holder, hold_lease
from penstock.messages import capped, counted
from penstock.plugins import optional
from penstock.redact import redact_text
from penstock.storage import Storage
from penstock.tasks.records.at_work import choosing_a_run
from penstock.tasks.records.ledger import Ledger, Run, lease_of
from penstock.training.checkpoint.store import CheckpointStore

__all__ = ["collect_status", "show_status", "state_of"]


def state_of(file: Path | None, overrides: Sequence[str] = ()) -> tuple[Storage, Path, str | None]:
    """Return the storage of `file`, its folder of embedded servers, and the pipeline's name (None for all).

    Raises:
        SpecError: `file` is wrong; or it is None, and the working directory has neither a pipeline.yaml nor a .penstock.
    """
    here = Path("pipeline.yaml")
    if file is not None or here.is_file():
        loaded = load_spec(file or here, overrides)
        return Storage(loaded.spec.storage), loaded.state_dir, loaded.spec.name if file is not None else None
    if not Path(".penstock").is_dir():
        advice = "go to its folder, or name the pipeline file: status FILE, log FILE; the other commands take --file FILE"
        raise SpecError("no pipeline.yaml and no .penstock in this folder", next_step=advice)
    return Storage(".penstock"), Path(".penstock").resolve(), None


def collect_status(file: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """List runs with their attempts; mark those without a process as killed, in Prefect and at the tracker too."""
    storage, state_dir, name = state_of(file, overrides)
    ledger = Ledger(storage)
    runs = [run for run in ledger.runs() if name in (None, run.pipeline)]
    suspects = [run for run in runs if any(attempt.is_open for attempt in ledger.attempts(run.run))]
    leases = {lease_of(run) for run in (*suspects, *(run for run in runs if run.status == "running"))}
    holders = {lease: current_holder(storage, lease) for lease in leases}
    repaired = _repair(ledger, state_dir, [run for run in suspects if holders[lease_of(run)] is None])
    sweeps = sweeps_among(ledger, (ledger.load_run(run.run) or run for run in runs if run.sweep == run.run))
    shown = [_describe(ledger, run, holders.get(lease_of(run))) | sweeps.get(run.run, {}) for run in runs]
    return {"status": "done", "storage": redact_text(storage.root), "runs": shown, "repaired": repaired}


def sweeps_among(ledger: Ledger, runs: Iterable[Run]) -> dict[str, dict[str, Any]]:
    """Describe sweeps and trials, by run. The plug-in `tune` is loaded where there are any."""
    sweeps = [run for run in runs if run.sweep == run.run]
    if not sweeps:
        return {}
    describe_sweeps = optional("penstock.flows.tune.summary:describe_sweeps")
    described: dict[str, dict[str, Any]] = {} if describe_sweeps is None else describe_sweeps(ledger, sweeps)
    return described


def show_status(result: dict[str, Any], console: Console) -> None:
    """Print a line for each run, never cut, and below it why it failed."""
    if not result["runs"]:
        console.print(f"no runs in {result['storage']}")
    for run in result["runs"]:
        words = [
            _describe_status(run) + (f" by {run['held_by']}" if run["held_by"] else ""),
            counted(len(run["attempts"]), "attempt"),
            f"step {run['step']:,}" if run["step"] else "",
            run["exactness"] or "",
            run["model_uri"] or "",
            run["cleaned"] or "",
        ]
        console.print("  ".join([run["run"], *filter(None, words)]))
        about = run["sweep"]["summary"] if run["sweep"] else run["trial"]["note"] if run["trial"] else ""
        *problems, next_step = run["why"] or [""]
        for line in filter(None, [about, *capped(problems, 4), next_step]):
            console.print(f"    {line}")
    for run_id in result["repaired"]:
        console.print(f"repaired: the end of {run_id} was missing, here or in Prefect")


def _describe_status(run: dict[str, Any]) -> str:
    """Describe the status; a trial has no later stages, so `partial` would mislead."""
    trial = run["trial"]
    if trial is None:
        return str(run["status"])
    how = trial["state"] if run["status"] == "partial" else run["status"]
    return f"trial {trial['number']}{', the best,' if trial['best'] else ''} {how}"


def _describe(ledger: Ledger, run: Run, holder: LeaseHolder | None) -> dict[str, Any]:
    run = ledger.load_run(run.run) or run
    try:
        committed = CheckpointStore(ledger.run_storage(run.run)).committed()
    except CheckpointError:  # of a newer penstock: the run is shown without its step
        committed = []
    attempts = ledger.attempts(run.run)
    # The newest attempt that trained, as for the step; the model may come from an earlier one.
    exactness = next((each.exactness for each in reversed(attempts) if each.exactness), run.result.get("exactness"))
    return {
        "run": run.run,
        "pipeline": run.pipeline,
        "status": run.status,
        "held_by": str(holder) if holder is not None and run.status == "running" else None,
        f"{run.tracker}_run_id": run.tracking_runs.get(run.tracker),
        "step": committed[0].manifest.step if committed else None,
        "checkpoint": committed[0].name if committed else None,
        "exactness": exactness,
        "model_uri": run.result.get("model_uri"),
        "cleaned": str(run.cleaned) if run.cleaned is not None else None,
        "metrics": run.result.get("metrics", {}),
        "sweep": None,
        "trial": None,
        "why": attempts[-1].why_failed if run.status == "failed" and attempts else [],
        "attempts": [
            attempt.model_dump(mode="json", include={"number", "status", "started", "ended", "exactness", "error", "fetched"})
            for attempt in attempts
        ],
    }


def _repair(ledger: Ledger, state_dir: Path, suspects: list[Run]) -> list[str]:
    """Close runs without a process, and return those whose end is on record now. Do nothing while Prefect's server is away."""
    repaired: list[str] = []
    if not suspects:
        return repaired
    try:
        with prefect_api(state_dir):
            from penstock.flows.run.repair import repair_run

            for run in suspects:
                # Opening Prefect takes seconds; another process may have continued the run meanwhile.
                with contextlib.suppress(LeaseHeldError), contextlib.ExitStack() as held:
                    with choosing_a_run(ledger.storage, run.pipeline):
                        held.enter_context(hold_lease(ledger.storage, lease_of(run)))
                    now = ledger.load_run(run.run)
                    if now is None:
                        continue
                    if repair_run(ledger, now, state_dir) or not any(attempt.is_open for attempt in ledger.attempts(run.run)):
                        repaired.append(run.run)
    except ServiceError as error:
        print(f"warning: not repaired: {error}", file=sys.stderr)
    return repaired
