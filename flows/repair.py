"""What does a process that vanished leave behind, and how is it put right in the ledger, in Prefect and in MLflow?

Whoever calls these functions holds the pipeline's lease: then an attempt that is still marked as running has no process.
"""

from __future__ import annotations

from flows.flow_runs import mark_crashed
from tasks.runs import Ledger, Run, utc_now
from training.checkpoint import CheckpointStore
from training.journal import read_journal
from training.tracking import repair

__all__ = ["close_attempts", "repair_run"]


def close_attempts(ledger: Ledger, run: Run) -> bool:
    """Mark attempts without a process as killed, and their flow runs as crashed. Returns whether there was one."""
    left = [attempt for attempt in ledger.attempts(run.run) if attempt.status == "running"]
    for attempt in left:
        ledger.save_attempt(run.run, attempt.model_copy(update={"status": "killed", "ended": utc_now()}))
        mark_crashed(attempt)
    return bool(left)


def repair_run(ledger: Ledger, run: Run, tracking_uri: str) -> bool:
    """Close a run that no process works on, and send MLflow what it missed. Returns whether anything was to repair."""
    if not close_attempts(ledger, run):
        return False
    ledger.save_run(run.model_copy(update={"status": "killed"}))
    if run.mlflow_run_id is not None:
        own = ledger.storage.child(f"runs/{run.run}")
        committed = CheckpointStore(own).committed()
        last = committed[0].manifest.step if committed else 0
        repair(tracking_uri, run.mlflow_run_id, status="KILLED", points=read_journal(own, last), outbox=own)
    return True
