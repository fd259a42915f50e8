"""What does the storage remember of a sweep? Small JSON, beside the records of the sweep's own run.

A sweep is a run, with the stages that its trials share, and each trial is one. What makes them a sweep:

    pipelines/<name>/sweep.json            the sweep that the next command continues
    runs/<sweep>/sweep.json                what it is a sweep of
    runs/<sweep>/trials/<n>.json           values, run, reports and end of a trial
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.config import Section
from penstock.storage import Storage

__all__ = [
    "Report",
    "SweepRecord",
    "Trial",
    "current_sweep",
    "load_trials",
    "save_sweep",
    "save_trial",
]


class SweepRecord(Section):
    """What a sweep is a sweep of."""

    version: Literal[1] = 1
    sweep: str
    """penstock's id of its run."""
    identity: str
    """Digest of all that its trials share. A changed file begins another sweep."""


class Report(Section):
    """A value of the metric as it arrived while a trial trained."""

    step: int
    value: float


class Trial(Section):
    """One trial of a sweep."""

    number: int
    """From 1."""
    values: dict[str, Any]
    """Key of the pipeline file -> its value in this trial."""
    state: Literal["running", "done", "stopped", "failed"] = "running"
    """`stopped`: ended early by the scheduler. One that is `running` and has no process was cut, and continues."""
    run: str | None = None
    """penstock's id of its run."""
    tracked_run: str | None = None
    value: float | None = None
    """The metric of the weights that would be registered; of a trial that was stopped, the best that was reported."""
    step: int | None = None
    weights_digest: str | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    reports: list[Report] = Field(default_factory=list)
    error: str | None = None
    note: str = ""
    """Why it ends early. It is on record with the report that decided it, before the trial is stopped."""


def current_sweep(storage: Storage, pipeline: str) -> SweepRecord | None:
    """Return the sweep that the next command continues, if there is one that can be read."""
    try:
        sweep = str(storage.read_json(f"pipelines/{pipeline}/sweep.json")["run"])
        return SweepRecord.model_validate_json(storage.read_bytes(f"runs/{sweep}/sweep.json"))
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # a ValidationError is a ValueError
        return None


def save_sweep(storage: Storage, pipeline: str, record: SweepRecord) -> None:
    """Write the record, and let it be the one that the next command continues."""
    storage.write_json(f"runs/{record.sweep}/sweep.json", record.model_dump(mode="json"))
    storage.write_json(f"pipelines/{pipeline}/sweep.json", {"run": record.sweep})


def load_trials(storage: Storage, sweep: str) -> list[Trial]:
    """Return the sweep's trials by number. One whose record cannot be read ends the list: its values will be proposed again."""
    found: list[Trial] = []
    for name in sorted(storage.list(f"runs/{sweep}/trials")):
        trial = storage.read_record(f"runs/{sweep}/trials/{name}", Trial)
        if trial is None or trial.number != len(found) + 1:
            break
        found.append(trial)
    return found


def save_trial(storage: Storage, sweep: str, trial: Trial) -> None:
    """Write a trial's record."""
    storage.write_json(f"runs/{sweep}/trials/{trial.number:04d}.json", trial.model_dump(mode="json"))
