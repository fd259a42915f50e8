"""What does a stage work with? One object per attempt, made by the flow and passed to every stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.preprocess.transform_spec import FittedPreprocess
from penstock.ingest.ray_tasks import ParallelMap, ray_map
from penstock.ingest.read.snapshot import SourceSnapshot
from penstock.ingest.shuffle.order import Order
from penstock.ingest.task_counts import TaskCounts
from penstock.machine.stopping import StopRequest
from penstock.progress import Progress
from penstock.redact import redact_text
from penstock.storage import Storage
from penstock.tasks.project import Project
from penstock.tasks.records.keys import StageKey
from penstock.tasks.records.ledger import Attempt, Ledger, Run
from penstock.tasks.stages import StageName

if TYPE_CHECKING:
    from penstock.training.events import Point
    from penstock.training.job import FeedOpener
    from penstock.training.tracking.tracker import Tracker

__all__ = ["Outcome", "Reporter", "RunContext", "StageOutcome", "Unfinished"]

Outcome = Literal["reused", "ran", "resumed", "begun"]
"""`begun`: of materialize, while training runs (tasks/overlap.py)."""


class Reporter(Protocol):
    """Where progress of the run is reported: a terminal, a log, a test."""

    def progress(self, stage: str) -> Progress:
        """Return the progress callable of one stage."""

    def report(self, text: str) -> None:
        """Print a line."""

    def warn(self, text: str) -> None:
        """Print a warning; the run goes on."""

    def finished(self, outcome: StageOutcome) -> None:
        """Report that a stage is done."""


class Unfinished(Protocol):
    """A stage that goes on while the next ones run."""

    record: Callable[[dict[str, Any]], object]

    def settle(self, *, wait: bool = False) -> None:
        """Record it if it is done, or raise its error; with `wait`, once it is."""

    def end(self) -> None:
        """Give it up."""


@dataclass(frozen=True)
class StageOutcome:
    """How a stage ended, and its output."""

    name: str
    key: str
    outcome: Outcome
    seconds: float
    output: dict[str, Any]
    facts: tuple[tuple[str, str], ...] = ()
    """Key figures of the output, as (label, value)."""
    because: tuple[str, ...] = ()
    """Why it was reused, run or resumed."""
    began: str = ""
    """UTC."""


@dataclass
class RunContext:
    """One attempt at one run.

    Attributes:
        work_storage: the run's own files, `runs/<run>` in the storage.
        state_dir: where embedded servers keep files on this machine.
        need_ray: starts or joins the Ray cluster on the first call; later calls return at once. True: it is this process's own.
        on_cluster: `need_ray` joins a cluster, whose machines may hold more than this one.
        will_train: whether the rows will be read by training, so that their hashes are worth checking.
        before: the pipeline's newest run as it was before this attempt, which this one is compared with.
        shown: keys of the stages whose outputs the tracked run has, as the attempt before has shown them.
        may_overlap: whether `materialize` may go on while `train` runs, and `overlapped` then is it.
        open_feeds: how rows are read that are not on disk, once they are ready; see tasks/prepare.py.
        on_points: called with the metric points of training, in order.
        on_report: called with every report of every rank of a function.
        stopping: whether a signal asked the run to stop; training then saves a checkpoint and returns.
    """

    project: Project
    keys: dict[str, StageKey]
    ledger: Ledger
    run: Run
    attempt: Attempt
    tracker: Tracker
    reporter: Reporter
    state_dir: Path
    need_ray: Callable[[], bool]
    stopping: StopRequest
    on_cluster: bool = False
    will_train: bool = True
    before: Run | None = None
    shown: frozenset[str] = frozenset()
    may_overlap: bool = False
    overlapped: Unfinished | None = None
    open_feeds: FeedOpener | None = None
    on_points: Callable[[Sequence[Point]], None] = lambda _points: None
    on_report: Callable[[dict[str, Any]], object] | None = None
    outcomes: dict[str, StageOutcome] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    task_counts: TaskCounts = field(default_factory=TaskCounts)

    def parallel(self, stage: StageName) -> ParallelMap:
        """Return what runs the Ray tasks of a stage on the nodes of `prepare`, after `read` with the GPUs of transforms."""
        spec = self.project.spec
        where = spec.prepare if stage == "read" else spec.preparing
        return partial(ray_map, where=where, count=partial(self.task_counts.add, stage))

    @property
    def storage(self) -> Storage:
        """Return the pipeline's storage."""
        return self.project.storage

    @property
    def work_storage(self) -> Storage:
        """Return the storage of this run alone."""
        return self.ledger.run_storage(self.run.run)

    def recorded(self, stage: StageName, key: str) -> dict[str, Any] | None:
        """Return the output of a stage with this key, of this attempt or on record."""
        found = self.outcomes.get(stage)
        return found.output if found is not None and found.key == key else self.ledger.stage_output(stage, key)

    def output(self, stage: str) -> dict[str, Any]:
        """Return the output of an earlier stage of this attempt."""
        return self.outcomes[stage].output

    @cached_property
    def snapshot(self) -> SourceSnapshot:
        """Output of `read`, with the files' present addresses: the folder may have been copied or moved since."""
        found = SourceSnapshot.model_validate(self.output("read"))
        here = {(file.location, file.name): file.uri for file in self.project.files}
        files = (f if (uri := here[f.location, f.name]) == f.uri else f.with_facts(uri=uri) for f in found.files)
        return found.model_copy(update={"files": tuple(files)})

    @property
    def fitted(self) -> FittedPreprocess:
        """Output of `preprocess`."""
        return FittedPreprocess.model_validate(self.output("preprocess"))

    @property
    def manifest(self) -> DatasetManifest:
        """Output of `materialize`."""
        return DatasetManifest.model_validate(self.output("materialize"))

    @property
    def order(self) -> Order:
        """Output of `shuffle`."""
        return Order.model_validate(self.output("shuffle")["order"])

    def warn(self, text: str) -> None:
        """Print a warning, and keep it for the attempt's record."""
        self.warnings.append(redact_text(text))
        self.reporter.warn(text)
