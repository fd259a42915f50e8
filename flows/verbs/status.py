"""List the runs of a storage, and repair their records in Prefect and at the tracker after kills."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.errors import CheckpointError, LeaseHeldError, PenstockError, ServiceError, SpecError
from penstock.flows.servers.services import prefect_api
from penstock.flows.spec_file import load_spec
from penstock.lease import LeaseHolder, current_holder, hold_lease
from penstock.messages import counted
from penstock.plugins import optional
from penstock.redact import redact_text
from penstock.storage import Storage
from penstock.tasks.records.at_work import choosing_a_run
from penstock.tasks.records.ledger import Attempt, Ledger, Run, lease_of
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
    suspects = [run for run in runs if any(map(_is_open, ledger.attempts(run.run)))]
    leases = {lease_of(run) for run in (*suspects, *(run for run in runs if run.status == "running"))}
    holders = {lease: current_holder(storage, lease) for lease in leases}
    repaired, reported = _repair(ledger, state_dir, [run for run in suspects if holders[lease_of(run)] is None])
    sweeps = sweeps_among(ledger, (ledger.load_run(run.run) or run for run in runs if run.sweep == run.run))
    shown = [_describe(ledger, run, holders.get(lease_of(run))) | sweeps.get(run.run, {}) for run in runs]
    return {"status": "done", "storage": redact_text(storage.root), "runs": shown, "repaired": repaired, "reported": reported}


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
    empty = _empty_runs(result["runs"])
    for run in result["runs"]:
        if run["run"] in empty:
            continue
        words = [
            _describe_status(run) + (f" by {run['held_by']}" if run["held_by"] else ""),
            _describe_attempts(run["status"], run["attempts"]),
            f"step {run['step']:,}" if run["step"] else "",
            run["exactness"] or "",
            run["model_uri"] or "",
            run["cleaned"] or "",
        ]
        console.print("  ".join([run["run"], *filter(None, words)]))
        about = run["sweep"]["summary"] if run["sweep"] else run["trial"]["note"] if run["trial"] else ""
        for line in [*filter(None, [about]), *_first_problems(run["why"])]:
            console.print(f"    {line}")
    if empty:
        console.print(
            f"not listed: {counted(len(empty), 'run')} that ended before training, as later ones have gone on; see --json"
        )
    for run_id in result["repaired"]:
        console.print(f"repaired: {run_id} was marked as running, and its process is gone")
    for run_id in result["reported"]:
        console.print(f"reported to Prefect's server: the end of {run_id}")


def _empty_runs(runs: Sequence[dict[str, Any]]) -> set[str]:
    """Return runs, given oldest first, that ended before training and that a later run of their pipeline has replaced."""
    newest = {run["pipeline"]: run["run"] for run in runs}
    return {
        run["run"]
        for run in runs
        if run["status"] == "partial" and not (run["step"] or run["model_uri"] or run["trial"] or run["sweep"])
        if newest[run["pipeline"]] != run["run"]
    }


def _first_problems(lines: list[str]) -> list[str]:
    """Shorten a long list of problems; the last line is the next step."""
    return lines if len(lines) <= 6 else [*lines[:4], f"  - and {len(lines) - 5} more", lines[-1]]


def _describe_status(run: dict[str, Any]) -> str:
    """Describe the status; a trial has no later stages, so `partial` would mislead."""
    trial = run["trial"]
    if trial is None:
        return str(run["status"])
    how = trial["state"] if run["status"] == "partial" else run["status"]
    return f"trial {trial['number']}{', the best,' if trial['best'] else ''} {how}"


def _describe_attempts(status: str, attempts: Sequence[dict[str, Any]]) -> str:
    """Count the attempts; name both if the newest is unfinished and an earlier one is done."""
    done = [attempt["number"] for attempt in attempts if attempt["status"] == "done"]
    if done and status != "done":  # most likely the end of fewer epochs
        return f"in attempt {attempts[-1]['number']}, done in attempt {done[-1]}"
    return counted(len(attempts), "attempt")


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
        "why": attempts[-1].why_failed(run.cleaned) if run.status == "failed" and attempts else [],
        "attempts": [
            attempt.model_dump(mode="json", include={"number", "status", "started", "ended", "exactness", "error", "fetched"})
            for attempt in attempts
        ],
    }


def _is_open(attempt: Attempt) -> bool:
    """Return whether the end of an attempt is missing here or in Prefect."""
    return attempt.status == "running" or attempt.prefect_missed_end


@contextlib.contextmanager
def _warn_not_repaired(kind: type[PenstockError]) -> Iterator[None]:
    """Warn of an error that prevents a repair, and go on."""
    try:
        yield
    except kind as error:
        print(f"warning: not repaired: {error}", file=sys.stderr)


def _repair(ledger: Ledger, state_dir: Path, suspects: list[Run]) -> tuple[list[str], list[str]]:
    """Close runs without a process. Do nothing while Prefect's server is away.

    Returns:
        (repaired, reported): runs that were marked as running, and runs whose end was reported to Prefect now.
    """
    repaired: list[str] = []
    reported: list[str] = []
    if not suspects:
        return repaired, reported
    with _warn_not_repaired(ServiceError), prefect_api(state_dir):
        from penstock.flows.run.repair import repair_run

        for run in suspects:
            # Opening Prefect takes seconds; another process may have continued the run meanwhile.
            with contextlib.suppress(LeaseHeldError), contextlib.ExitStack() as held:
                with choosing_a_run(ledger.storage, run.pipeline):
                    held.enter_context(hold_lease(ledger.storage, lease_of(run)))
                now = ledger.load_run(run.run)
                missed = _missed(ledger, run)
                if now is not None and repair_run(ledger, now, state_dir):
                    repaired.append(run.run)
                elif missed and not _missed(ledger, run):
                    reported.append(run.run)
    return repaired, reported


def _missed(ledger: Ledger, run: Run) -> bool:
    """Return whether Prefect lacks the end of an attempt."""
    return any(attempt.prefect_missed_end for attempt in ledger.attempts(run.run))
