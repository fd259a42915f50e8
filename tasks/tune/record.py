"""What does the storage remember of a sweep? Small JSON, beside the records of the sweep's own run.

A sweep is a run, with the stages that its trials share, and each trial is one. What makes them a sweep:

    pipelines/<name>/sweep.json            the sweep that the next command continues
    runs/<sweep>/trials/<n>.json           values, run, reports and end of a trial
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.config import Section
from penstock.storage import Storage

__all__ = ["Report", "Trial", "current_sweep", "load_trials", "make_current_sweep", "save_trial"]


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
    value: float | None = None
    """The metric of the weights that would be registered; of a trial that was stopped, the best that was reported."""
    step: int | None = None
    weights_digest: str | None = None
    reports: list[Report] = Field(default_factory=list)
    error: str | None = None
    note: str = ""
    """Why it ends early. It is on record with the report that decided it, before the trial is stopped."""


def current_sweep(storage: Storage, pipeline: str) -> str | None:
    """Return penstock's id of the sweep that the next command continues, if there is one."""
    try:
        return str(storage.read_json(f"pipelines/{pipeline}/sweep.json")["run"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # it is not there, or is not such a record
        return None


def make_current_sweep(storage: Storage, pipeline: str, sweep: str) -> None:
    """Let the next command continue this sweep."""
    storage.write_json(f"pipelines/{pipeline}/sweep.json", {"run": sweep})


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
