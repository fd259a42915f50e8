"""How do the verbs that look back describe a sweep?"""

from __future__ import annotations

import io
from pathlib import Path

from penstock.flows.answer import LineConsole
from penstock.flows.history.log import collect_log, show_log
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.status import collect_status, show_status
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger
from penstock.tasks.tune.record import Trial, save_trial
from tests.drills.project import make_project


def test_sweep_is_described_by_its_trials(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    ledger = Ledger(Storage(load_spec(file).spec.storage))
    section = {"metric": "val/loss", "mode": "min", "space": {"train.epochs": {"choice": [1, 2]}}}
    sweep = ledger.new_run("drill", {"tune": section})
    sweep = sweep.model_copy(update={"run": f"{sweep.run}-sweep", "sweep": f"{sweep.run}-sweep", "status": "interrupted"})
    reused = [{"name": "read", "key": "k", "outcome": "reused", "seconds": 0.0}]
    cut = {"state": "running", "value": None}
    stopped = {"state": "stopped", "note": "stopped early by asha after 1 validation", "value": 0.1}
    ends: list[dict[str, object]] = [{"state": "done", "value": 0.5}, stopped, cut, {"state": "done", "value": 0.2}]
    ledger.save_run(sweep)
    for status in ("done", "interrupted"):
        attempt = ledger.new_attempt(sweep.run)
        ledger.save_attempt(sweep.run, attempt.model_copy(update={"status": status, "stages": reused}))
    for number, end in enumerate(ends, 1):
        run = sweep.model_copy(
            update={"run": f"{sweep.run}-{number:03d}", "status": "partial" if end != cut else "interrupted"}
        )
        run = run.model_copy(update={"sweep": None if number == 4 else sweep.run})  # the best is the pipeline's own
        ledger.save_run(run)
        ledger.save_attempt(run.run, ledger.new_attempt(run.run).model_copy(update={"status": run.status}))
        trial = {"number": number, "values": {"train.epochs": 2}, "run": run.run, **end}
        save_trial(ledger.storage, sweep.run, Trial.model_validate(trial))

    told = "4 trials (2 done, 1 stopped early, 1 cut); the best is trial 4: val/loss 0.2 with train.epochs 2"
    said = io.StringIO()
    found = collect_status(file)
    show_status(found, LineConsole(file=said, width=200))
    lines = sorted(line.replace(sweep.run, "S") for line in said.getvalue().splitlines())
    assert lines == sorted(
        [
            *("S  interrupted  2 attempts", f"    {told}"),
            *("S-001  trial 1 done  1 attempt", "    val/loss 0.5"),
            *("S-002  trial 2 stopped early  1 attempt", "    stopped early by asha after 1 validation"),
            "S-003  trial 3 interrupted  1 attempt",
            *("S-004  trial 4, the best, done  1 attempt", "    val/loss 0.2"),
        ]
    )
    described = next(run["sweep"] for run in found["runs"] if run["run"] == sweep.run)
    assert described["states"] == {"done": 2, "stopped early": 1, "cut": 1} and described["best"]["run"] == f"{sweep.run}-004"

    logged = io.StringIO()
    show_log(collect_log(file), LineConsole(file=logged, width=200))
    when = f"{ledger.attempts(sweep.run)[0].started[:16].replace('T', ' ')}  "
    lines = sorted(line.replace(sweep.run, "S").removeprefix(when) for line in logged.getvalue().splitlines())
    assert lines == [f"    {told}", "S  attempt 1  done", "S  attempt 2  interrupted", "S-004  attempt 1  trial 4 done"]
