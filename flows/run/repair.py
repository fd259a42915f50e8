"""Repair the records of a vanished process in the ledger, in Prefect and at the tracker.

The caller holds the run's lease: an attempt that is marked as running has no process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import PenstockError
from penstock.flows.run.flow_runs import report_end
from penstock.tasks.records.ledger import Attempt, Ledger, Run, Status
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.tracking.registry import TRACKERS
from penstock.training.tracking.tracker import RunStatus

__all__ = ["TRACKED_STATUS", "close_attempts", "repair_run"]

_log = logging.getLogger("penstock.tracking")

TRACKED_STATUS: dict[Status, RunStatus] = {
    "done": "FINISHED",
    "partial": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
    "killed": "KILLED",
}
"""Status of a run without a process -> status at the tracker."""


def close_attempts(ledger: Ledger, run: Run, attempts: Iterable[Attempt]) -> Status | None:
    """Mark attempts without a process as ended, report missed ends to Prefect, and return the status of the last one."""
    ended: Status | None = None
    for attempt in attempts:
        if attempt.status != "running":
            if attempt.prefect_missed_end and report_end(attempt):
                ledger.save_attempt(run.run, attempt.model_copy(update={"prefect_missed_end": False}))
            continue
        attempt = ledger.as_ended(run, attempt).model_copy(update={"prefect_missed_end": True})
        ended = attempt.status
        ledger.save_attempt(run.run, attempt)
        if report_end(attempt):
            ledger.save_attempt(run.run, attempt.model_copy(update={"prefect_missed_end": False}))
    return ended


def repair_run(ledger: Ledger, run: Run, state_dir: Path) -> bool:
    """Close a run without a process, and update its tracker; return whether there was anything to repair.

    If the tracker's package is missing, warn, and repair the ledger alone.
    """
    ended = close_attempts(ledger, run, ledger.attempts(run.run))
    if ended is None:
        return False
    if run.status != ended:
        run = run.model_copy(update={"status": ended})
        ledger.save_run(run)
    _update_tracker(ledger, run, state_dir)
    return True


def _update_tracker(ledger: Ledger, run: Run, state_dir: Path) -> None:
    """Send the tracker the status and the points that it missed of a run without a process."""
    if run.tracker not in run.tracking_runs:
        return
    try:
        tracker = TRACKERS.get(run.tracker)
    except PenstockError as error:
        _log.warning("run %s is not updated at its tracker: %s", run.run, error.message)
        return
    own = ledger.run_storage(run.run)
    committed = CheckpointStore(own).committed()
    last = committed[0].manifest.step if committed else 0
    tracker.repair(
        tracker.default_uri(state_dir),
        run.tracking_runs[run.tracker],
        status=TRACKED_STATUS[run.status],
        tags={"penstock.status": run.status},
        points=read_journal(own, last),
        outbox=own,
    )
