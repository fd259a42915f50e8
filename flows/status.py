"""Which runs does a storage know, and is what Prefect and MLflow say about them true? Repairs what kills left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flows.services import mlflow_uri, prefect_api
from flows.spec_file import load_spec
from penstock.errors import SpecError
from penstock.lease import current_holder
from penstock.storage import Storage
from tasks.runs import Attempt, Ledger, Run, utc_now
from training.checkpoint import CheckpointStore
from training.journal import read_journal
from training.tracking import repair

__all__ = ["collect_status", "show_status", "state_of"]


def state_of(file: Path | None) -> tuple[Storage, Path, str | None]:
    """The storage, the folder of embedded servers, and the pipeline's name (None for all) that `file` stands for."""
    if file is not None:
        loaded = load_spec(file)
        return Storage(loaded.spec.storage), loaded.state_dir, loaded.spec.name
    if Path("pipeline.yaml").is_file():
        loaded = load_spec("pipeline.yaml")
        return Storage(loaded.spec.storage), loaded.state_dir, None
    if not Path(".penstock").is_dir():
        raise SpecError(
            "no pipeline.yaml and no .penstock in this folder", next_step="name the pipeline file: penstock status FILE"
        )
    return Storage(".penstock"), Path(".penstock").resolve(), None


def collect_status(file: Path | None) -> dict[str, Any]:
    """List runs with their attempts; attempts whose process is gone are marked killed, in Prefect and in MLflow too."""
    storage, state_dir, name = state_of(file)
    ledger = Ledger(storage)
    shown: list[dict[str, Any]] = []
    vanished: list[tuple[Run, Attempt]] = []
    for run in ledger.runs():
        if name not in (None, run.pipeline):
            continue
        holder = current_holder(storage, f"pipelines/{run.pipeline}/lease")
        attempts = ledger.attempts(run.run)
        vanished += [(run, a) for a in attempts if a.vanished or (a.status == "running" and holder is None)]
        shown.append(_describe(storage, run, attempts, str(holder) if holder and run.status == "running" else None))
    repaired = _repair(ledger, state_dir, vanished) if vanished else []
    for entry in shown:
        if entry["run"] in repaired:
            entry["status"] = "killed"
    return {"status": "done", "storage": storage.root, "runs": shown, "repaired": repaired}


def show_status(result: dict[str, Any], console: Console) -> None:
    """Print the runs for a person."""
    table = Table("run", "status", "attempts", "step", "exactness", "model", box=None)
    for run in result["runs"]:
        status = run["status"] + (f" by {run['held_by']}" if run["held_by"] else "")
        model = run["model_uri"] or ""
        table.add_row(run["run"], status, str(len(run["attempts"])), str(run["step"] or ""), run["exactness"] or "", model)
    console.print(table)
    for run_id in result["repaired"]:
        console.print(f"repaired: {run_id} was marked as running although its process is gone", markup=False)


def _describe(storage: Storage, run: Run, attempts: list[Attempt], holder: str | None) -> dict[str, Any]:
    committed = CheckpointStore(storage.child(f"runs/{run.run}")).committed()
    return {
        "run": run.run,
        "pipeline": run.pipeline,
        "status": run.status,
        "held_by": holder,
        "mlflow_run_id": run.mlflow_run_id,
        "step": committed[0].manifest.step if committed else None,
        "checkpoint": committed[0].name if committed else None,
        "exactness": run.result.get("exactness"),
        "model_uri": run.result.get("model_uri"),
        "metrics": run.result.get("metrics", {}),
        "attempts": [
            a.model_dump(mode="json", include={"number", "status", "started", "ended", "exactness", "error"}) for a in attempts
        ],
    }


def _repair(ledger: Ledger, state_dir: Path, vanished: list[tuple[Run, Attempt]]) -> list[str]:
    with prefect_api(state_dir):
        from flows.flow_runs import mark_crashed

        for run, attempt in vanished:
            ledger.save_attempt(run.run, attempt.model_copy(update={"status": "killed", "ended": utc_now()}))
            ledger.save_run(run.model_copy(update={"status": "killed"}))
            mark_crashed(attempt)
            if run.mlflow_run_id is not None:
                own = ledger.storage.child(f"runs/{run.run}")
                committed = CheckpointStore(own).committed()
                last = committed[0].manifest.step if committed else 0
                repair(mlflow_uri(state_dir), run.mlflow_run_id, status="KILLED", points=read_journal(own, last), outbox=own)
    return sorted({run.run for run, _ in vanished})
