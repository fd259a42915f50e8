"""What does the storage remember of runs, attempts and stages? The ledger that survives without any server.

A *run* is one pipeline run over all its attempts; an *attempt* is one process that worked on it. Records are small JSON files:

    pipelines/<name>/current.json        the run that the next command continues: the one that was begun or taken up last
    pipelines/<name>/trainings/<key>.json  the run whose training has that key, for a command that goes back
    pipelines/<name>/aliases/<digest>.json  the run that gave an alias to its version of a registered model last
    runs/<run>/run.json                  identity, spec and stage keys of the run
    runs/<run>/environment.txt           versions and machine of its newest attempt that trained
    runs/<run>/figures/<split>-<name>.png  what evaluate drew
    runs/<run>/answers/<split>.arrow     the model's answer on each held-out row
    runs/<run>/attempts/<n>.json         who worked on it, when, and how it ended
    runs/<run>/stages/<stage>.json       outputs that belong to this run (train, evaluate, register)
    stages/<stage>/<key>.json            outputs any run with the same key may reuse
    profiles/<key>.json                  what the rows were that the materialize stage of that key prepared

A cleaned run (tasks/retention) keeps small records: its own, and those of its stages.
"""

from __future__ import annotations

import datetime as dt
import io
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from penstock.config import Section
from penstock.digest import digest_of
from penstock.errors import ResumeError
from penstock.ingest.materialize.profile import Profile
from penstock.ingest.schema import Split
from penstock.lease import last_heartbeat
from penstock.machine.process import ProcessIdentity
from penstock.redact import first_line
from penstock.storage import Storage
from penstock.tasks.records.keys import StageKey
from penstock.tasks.stages import StageName
from penstock.training.spec import TrackingSpec

__all__ = [
    "Attempt",
    "Cleaned",
    "Ledger",
    "NodeFetches",
    "Run",
    "StageRecord",
    "Status",
    "lease_of",
    "lease_path",
    "run_leases",
    "sweep_lease_path",
    "utc_now",
]

_ATTEMPT = re.compile(r"(\d+)\.json")

Status = Literal["running", "done", "partial", "failed", "interrupted", "killed"]
"""`partial`: stopped on purpose after `--until`; `killed`: its process vanished."""


def lease_path(pipeline: str) -> str:
    """Return the path of the lease of a pipeline's name; its holder alone chooses, begins or repairs a run of it."""
    return f"pipelines/{pipeline}/lease"


def run_leases(pipeline: str) -> str:
    """Return the folder of the leases of a pipeline's runs, by run id."""
    return f"pipelines/{pipeline}/leases"


def sweep_lease_path(pipeline: str) -> str:
    """Return the path of the lease of a pipeline's sweep; its holder alone works on it and on its trials."""
    return f"pipelines/{pipeline}/sweep-lease"


def utc_now() -> str:
    """Return the time now, UTC, to the second, in ISO format."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


class Cleaned(Section):
    """When and by what the data of a record were deleted."""

    at: str
    """UTC."""
    by: str
    """What deleted them, as in `penstock clean on host`."""

    def __str__(self) -> str:
        return f"cleaned on {self.at[:10]} by {self.by}"


class StageRecord(Section):
    """The output of a stage that finished: small JSON, never the data."""

    version: Literal[1] = 1
    stage: str
    key: str
    inputs: dict[str, Any]
    output: dict[str, Any]
    seconds: float
    made: str
    """When it finished, UTC."""
    run: str = ""
    """The run that made it."""
    cleaned: Cleaned | None = None
    """Its data are deleted: the record is kept to be read, and never reused."""


class NodeFetches(Section):
    """Prepared rows that the ranks of one node fetched from the store."""

    bytes: int = 0
    wait_s: float = 0.0
    """Seconds that its ranks waited for shards."""


class Attempt(Section):
    """One process that worked on a run."""

    number: int
    process: ProcessIdentity
    started: str
    ended: str | None = None
    """None, too, if its process vanished and no heartbeat is on record."""
    status: Status = "running"
    prefect_flow_run_id: str | None = None
    prefect_missed_end: bool = False
    """Prefect's server was away when the attempt ended: a later command reports the end."""
    sent_to: str | None = None
    """The tracked run that has all its records; None while the outbox may hold some, as where it did not end by itself."""
    exactness: str | None = None
    """`bit-exact`, `same-order: why`, or why neither; None until training was reached."""
    resumed_from_step: int | None = None
    workers: dict[int, str] = Field(default_factory=dict)
    """Rank -> `host:pid` of the newest worker group: which process to inspect, or to kill, when training hangs."""
    fetched: dict[str, NodeFetches] = Field(default_factory=dict)
    """By node, if the rows are in a remote store."""
    stages: list[dict[str, Any]] = Field(default_factory=list)
    """Name, key, outcome, begin and seconds of each stage reached, and because of what it was reused or run."""
    command: str = ""
    """What would do it again, to be pasted into a shell."""
    warnings: list[str] = Field(default_factory=list)
    changed: list[str] = Field(default_factory=list)
    """What differs from the pipeline's attempt before: lines about the spec, the code, the data and the versions."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Measured on the weights it ended with."""
    model_uri: str | None = None
    """The version that it has registered; not one that it found registered already."""
    error: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether its end is missing here or in Prefect."""
        return self.status == "running" or self.prefect_missed_end

    @property
    def why_failed(self) -> list[str]:
        """The lines of the error, if it failed."""
        return (self.error or "").splitlines() if self.status == "failed" else []


class Run(Section):
    """One pipeline run over all its attempts."""

    version: Literal[1] = 1
    run: str
    """penstock's id of the run."""
    pipeline: str
    created: str
    spec: dict[str, Any]
    """The resolved spec of the newest attempt."""
    origins: dict[str, str] = Field(default_factory=dict)
    keys: dict[str, StageKey] = Field(default_factory=dict)
    """Stage keys of the newest attempt."""
    tracking_runs: dict[str, str] = Field(default_factory=dict)
    """Name of a tracker -> its id of the run; the pipeline file may name another one in a later attempt."""
    sweep: str | None = None
    """The sweep that it is a trial of, or that it is itself: see tasks/tune/record.py."""
    status: Status = "running"
    """Of the newest attempt: one before it may have come to the end."""
    done_key: str | None = None
    """Key of the train stage when the run was last done. While it still holds, there is no unfinished training to lose."""
    result: dict[str, Any] = Field(default_factory=dict)
    """What the last finished attempt reported."""
    cleaned: Cleaned | None = None
    """Its checkpoints, figures and answers are deleted: it does not continue."""

    @property
    def tracker(self) -> str:
        """Return the name of the newest attempt's tracker."""
        return str(self.spec.get("tracking", {}).get("tracker", TrackingSpec().tracker))


class _Noted(Section):
    """The run that a pointer names."""

    run: str


def lease_of(run: Run) -> str:
    """Return the lease that a process which works on `run` holds."""
    return f"{run_leases(run.pipeline)}/{run.run}" if run.sweep is None else sweep_lease_path(run.pipeline)


class Ledger:
    """Reads and writes the records of one storage. A stage's or attempt's record that does not parse counts as absent.

    Raises:
        PreflightError: the storage is a file.
    """

    def __init__(self, storage: Storage) -> None:
        storage.refuse_file()
        self.storage = storage
        self._records: dict[str, StageRecord] = {}
        """Records of stages, by path: what a stage of one key gave does not change, so each is read once."""
        self._run: Run | None = None
        """The run that was saved last, which is not written again as it is."""
        self._pointers: dict[str, str] = {}
        """Pointer -> the run that it names."""

    def new_run(self, pipeline: str, spec: dict[str, Any], after: Run | None = None) -> Run:
        """Make a run and let it be the one the next command continues. Nothing is written until `save_run`.

        Args:
            after: the run before, which is created earlier, whatever the clock says.
        """
        now = dt.datetime.now(dt.UTC)
        if after is not None:
            now = max(now, dt.datetime.fromisoformat(after.created) + dt.timedelta(seconds=1))
        created, stamp = now.isoformat(timespec="seconds"), now.strftime("%Y%m%d-%H%M%S")
        return Run(run=f"{pipeline}-{stamp}-{secrets.token_hex(2)}", pipeline=pipeline, created=created, spec=spec)

    def current_run(self, pipeline: str) -> Run | None:
        """Return the run that the next command continues, if there is one.

        Raises:
            ResumeError: there is one, and its records cannot be read. To begin another in silence would bury its checkpoints.
        """
        pointer = f"pipelines/{pipeline}/current.json"
        try:
            run_id = self._pointers[pointer] = str(self.storage.read_json(pointer)["run"])
            return Run.model_validate_json(self.storage.read_bytes(f"runs/{run_id}/run.json"))
        except FileNotFoundError as error:
            if not self.storage.exists(pointer):
                return None
            raise self._unreadable(pipeline, error) from error
        except (ValueError, KeyError, TypeError) as error:  # a ValidationError is a ValueError
            raise self._unreadable(pipeline, error) from error

    def _unreadable(self, pipeline: str, error: Exception) -> ResumeError:
        return ResumeError(
            f"the record of the last run of {pipeline!r} cannot be read: {first_line(error)}",
            problems=[f"it is named in {self.storage.uri(f'pipelines/{pipeline}/current.json')}"],
            next_step="restore that file or the run.json it names from a backup, or begin a new run: penstock run FILE --fresh",
        )

    def make_current(self, run: Run) -> None:
        """Point the pipeline at `run`, and its training's key, where it is known, too; its record must be saved first."""
        pointer = f"pipelines/{run.pipeline}/current.json"
        if self._pointers.get(pointer) != run.run:
            self.storage.write_json(pointer, {"run": run.run})
            self._pointers[pointer] = run.run
        self.note_training(run)

    def note_training(self, run: Run) -> None:
        """Let `run_with_training` find the run by its training's key, where that is known; its record must be saved first."""
        if run.keys and run.keys["train"].key not in ("", run.done_key):  # before it was done, it was noted
            self.storage.write_json(f"pipelines/{run.pipeline}/trainings/{run.keys['train'].key}.json", {"run": run.run})

    def run_with_training(self, pipeline: str, key: str) -> Run | None:
        """Return the newest run of the pipeline whose training has that key, if there is one."""
        noted = self.storage.read_record(f"pipelines/{pipeline}/trainings/{key}.json", _Noted)
        run = self.load_run(noted.run) if noted is not None else None
        return run if run is not None and run.cleaned is None and run.keys["train"].key == key else None

    def note_alias(self, run: Run, model: str, alias: str) -> None:
        """Note that `run` gives `alias` to its version of `model`: before it does, because a kill may come between the two."""
        self.storage.write_json(self._alias_path(run.pipeline, model, alias), {"run": run.run})

    def run_with_alias(self, pipeline: str, model: str, alias: str) -> str | None:
        """Id of the pipeline's run that gave `alias` to its version of `model` last, if that is known."""
        noted = self.storage.read_record(self._alias_path(pipeline, model, alias), _Noted)
        return noted.run if noted is not None else None

    def runs_with_alias(self, pipeline: str) -> list[str]:
        """List the pipeline's runs that were the last to give an alias to their model."""
        folder = f"pipelines/{pipeline}/aliases"
        return [str(self.storage.read_json(f"{folder}/{name}")["run"]) for name in self.storage.list(folder)]

    def _alias_path(self, pipeline: str, model: str, alias: str) -> str:
        return f"pipelines/{pipeline}/aliases/{digest_of([model, alias])}.json"

    def load_run(self, run_id: str) -> Run | None:
        """Read a run's record; None if it is missing or cannot be read."""
        return self.storage.read_record(f"runs/{run_id}/run.json", Run)

    def save_run(self, run: Run) -> None:
        """Write a run's record, unless it is the one that was written last."""
        if run != self._run:
            self.storage.write_json(f"runs/{run.run}/run.json", run.model_dump(mode="json"))
            self._run = run

    def save_profile(self, key: str, profile: dict[str, Any]) -> None:
        """Keep what the rows were that the materialize stage of `key` prepared."""
        self.storage.write_json(f"profiles/{key}.json", profile)

    def profile(self, key: str) -> Profile | None:
        """Read what `save_profile` kept; None if nothing is on record."""
        return self.storage.read_record(f"profiles/{key}.json", Profile)

    def save_answers(self, run_id: str, split: Split, rows: pa.Table) -> None:
        """Keep a model's answers on a split: columns of training/evaluation/evaluate.py, `file` and `row` where known."""
        into = io.BytesIO()
        with pa.ipc.new_file(into, rows.schema) as writer:
            writer.write_table(rows)
        self.storage.write_bytes(f"runs/{run_id}/answers/{split}.arrow", into.getvalue())

    def answers(self, run_id: str, split: Split) -> pa.Table | None:
        """Read what `save_answers` kept; None if nothing is on record."""
        try:
            return pa.ipc.open_file(io.BytesIO(self.storage.read_bytes(f"runs/{run_id}/answers/{split}.arrow"))).read_all()
        except (FileNotFoundError, pa.ArrowInvalid):
            return None

    def run_storage(self, run_id: str) -> Storage:
        """Return the part of the storage that belongs to one run: its checkpoints, journal and outbox."""
        return self.storage.child(f"runs/{run_id}")

    def runs(self) -> Iterator[Run]:
        """Every run in the storage, oldest first."""
        found = (self.load_run(name) for name in self.storage.list("runs"))
        yield from sorted((run for run in found if run is not None), key=lambda run: run.created)

    def attempt_numbers(self, run_id: str) -> list[int]:
        """List the numbers of a run's attempts, in order."""
        # By name, and not by what can be read: a damaged record must not be written over. Other files are not ours.
        names = map(_ATTEMPT.fullmatch, self.storage.list(f"runs/{run_id}/attempts"))
        return sorted(int(match[1]) for match in names if match)

    def attempts(self, run_id: str) -> list[Attempt]:
        """Read a run's attempts, in order."""
        return [*self._attempts(run_id, self.attempt_numbers(run_id))]

    def newest_attempts(self, run_id: str, numbers: Sequence[int]) -> list[Attempt]:
        """Read the attempts from the newest closed one on, in order: it has closed those before it."""
        found: list[Attempt] = []
        for attempt in self._attempts(run_id, reversed(numbers)):
            found.insert(0, attempt)
            if not attempt.is_open:
                break
        return found

    def _attempts(self, run_id: str, numbers: Iterable[int]) -> Iterator[Attempt]:
        paths = (f"runs/{run_id}/attempts/{number:04d}.json" for number in numbers)
        return filter(None, (self.storage.read_record(path, Attempt) for path in paths))

    def has_trained(self, run_id: str) -> bool:
        """Return whether workers of the run ever began to train, in an attempt that is on record."""
        return any(attempt.workers for attempt in self.attempts(run_id))

    def new_attempt(self, run_id: str, prefect_flow_run_id: str | None = None, number: int = 0, **facts: Any) -> Attempt:
        """Write the record of an attempt by this process, by default with the next number; `facts` are further fields."""
        attempt = Attempt(
            number=number or max(self.attempt_numbers(run_id), default=0) + 1,
            process=ProcessIdentity.current(),
            started=utc_now(),
            prefect_flow_run_id=prefect_flow_run_id,
            **facts,
        )
        self.save_attempt(run_id, attempt)
        return attempt

    def as_ended(self, run: Run, attempt: Attempt) -> Attempt:
        """Return an attempt whose process is gone with its status, and the last heartbeat of its lease as its end."""
        # At the end of an attempt the run's record is written first: it may already hold the status.
        knows = run.status != "running" and run.result.get("attempt") == attempt.number
        seen = last_heartbeat(self.storage, lease_of(run), attempt.process)
        beat = None if seen is None else dt.datetime.fromtimestamp(seen, dt.UTC).isoformat(timespec="seconds")
        ended = None if beat is None else max(attempt.started, beat)
        return attempt.model_copy(update={"status": run.status if knows else "killed", "ended": ended})

    def save_attempt(self, run_id: str, attempt: Attempt) -> None:
        """Write an attempt's record."""
        self.storage.write_json(f"runs/{run_id}/attempts/{attempt.number:04d}.json", attempt.model_dump(mode="json"))

    def stage_output(self, stage: StageName, key: str) -> dict[str, Any] | None:
        """Return the output on record of a stage that belongs to no run."""
        record = self.stage_record(f"stages/{stage}/{key}.json", key)
        return record.output if record is not None else None

    def stage_record(self, path: str, key: str, *, cleaned: bool = False) -> StageRecord | None:
        """Return the record at `path` if it parses and carries `key`; with `cleaned` also one whose data are deleted."""
        record = self._records.get(path) or self.storage.read_record(path, StageRecord)
        if record is not None:
            self._records[path] = record
        return record if record is not None and record.key == key and (cleaned or record.cleaned is None) else None

    def save_stage(self, path: str, record: StageRecord) -> None:
        """Write a stage's record: the last thing a stage does."""
        self._records.pop(path, None)
        self.storage.write_json(path, record.model_dump(mode="json"))
