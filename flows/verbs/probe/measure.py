"""How fast are a pipeline's rows read? They are prepared as in a run, or found, and read by its workers without a model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, cast

from pydantic import Field

from penstock.config import Section
from penstock.flows.run.open_attempt import RayOnDemand
from penstock.flows.run.preflight import check_machine, check_resources
from penstock.flows.spec_file import LoadedSpec, as_override, load_spec
from penstock.ingest.phases import PHASES, Phase
from penstock.lease import current_holder, hold_lease
from penstock.machine.process import ProcessIdentity
from penstock.machine.stopping import StopRequest
from penstock.progress import Progress, silent
from penstock.storage import Storage
from penstock.tasks.all_stages import ALL_STAGES
from penstock.tasks.context import Reporter, RunContext, StageOutcome
from penstock.tasks.project import Project
from penstock.tasks.records.keys import stage_keys
from penstock.tasks.records.ledger import Attempt, Ledger, utc_now
from penstock.tasks.spec import PipelineSpec
from penstock.tasks.stage import perform
from penstock.tasks.stages import BEFORE_TRAINING
from penstock.tasks.train import make_job
from penstock.training.events import Event
from penstock.training.on_ray.dummy_trainer import RankReading, read_rank, readings_of
from penstock.training.on_ray.trainer import train
from penstock.training.tracking.tracker import Tracker

__all__ = ["NODE_CACHE", "OTHER", "Reading", "Reads", "summarized"]


NODE_CACHE, OTHER = "node cache", "other"
"""Places besides those of `penstock.ingest.phases`: shards that were evicted are fetched again; and what no phase names, such
as finding rows' numbers, cutting batches apart and handing them over."""

FETCHED_AGAIN = 1.2
"""A node that fetches more than so many times the split's bytes has evicted shards that it needed again."""


class Reading(Section):
    """What reading with one set of values was like, over all workers."""

    values: dict[str, Any] = Field(default_factory=dict)
    """Key of the pipeline file -> its value; none for the file as it is."""
    prepare_s: float
    """Seconds until the rows were there to read; next to none where they were."""
    rows_per_s: float
    """Of all workers together, once the first batch is there."""
    worker_mib_per_s: float
    """Of one worker, on average."""
    first_batch_s: float
    """Of the worker that waited longest, from the opening of its feed: with a stream, the start of Ray's processes too."""
    first_time: dict[str, float]
    """Share of that time by place, the largest first."""
    p50_s: float
    """Half of the waits for a batch were no longer. The first batch is left out."""
    p95_s: float
    longest_s: float
    epochs: float
    """How much was read: 1.5 is an epoch and a half."""
    time: dict[str, float]
    """Share of the workers' time by place, the largest first; together 1. Of what comes before the first batch the start of
    processes is left out, which comes once, and of more than two epochs the rest."""
    place: str
    """Where most of it goes."""
    fetched_bytes: int
    split_bytes: int
    """Of the train split's shards; 0 where it has none."""
    ranks: list[RankReading]


class _Untracked:
    """Stands for a tracker where nothing is tracked."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_arguments, **_options: None


class _Quiet:
    """Hears how preparing goes, and says what must be known."""

    def __init__(self, reporter: Reporter, stages: bool) -> None:
        self._reporter, self._stages = reporter, stages

    def progress(self, stage: str) -> Progress:
        return self._reporter.progress(stage) if self._stages else silent

    def say(self, text: str) -> None:
        self._reporter.say(text)

    def warn(self, text: str) -> None:
        if self._stages:
            self._reporter.warn(text)

    def finished(self, outcome: StageOutcome) -> None:
        if self._stages:
            self._reporter.finished(outcome)


class Reads:
    """Reads a pipeline with one set of values after the other, on one Ray cluster. No run is begun.

    Args:
        need_ray: of the pipeline as it is.
        limit_s: seconds that the workers read at most, each time.
    """

    def __init__(
        self, loaded: LoadedSpec, reporter: Reporter, stopping: StopRequest, need_ray: RayOnDemand, limit_s: float
    ) -> None:
        self._loaded, self._reporter, self._stopping = loaded, reporter, stopping
        self._need_ray, self._limit_s = need_ray, limit_s

    def spec(self, values: Mapping[str, Any]) -> PipelineSpec:
        """The pipeline with other values. Raises SpecError where they do not fit it."""
        return self._load(values).spec

    def read(self, values: Mapping[str, Any]) -> Reading:
        """Prepare the rows, if they are not there, and let the workers read them.

        Raises:
            PenstockError: the rows cannot be prepared or read, or the resources do not do.
        """
        loaded = self._load(values)
        project = Project(loaded.spec, loaded.base_dir, loaded.origins)
        check_resources(project)
        if not self._need_ray.cluster or self._need_ray.cluster.embedded:
            check_machine(loaded.spec)
        ctx = self._context(loaded, project, stages=not values)
        for stage in ALL_STAGES:
            if stage.name in BEFORE_TRAINING:
                self._stopping.check()
                perform(stage, ctx)
        prepare_s = sum(outcome.seconds for outcome in ctx.outcomes.values())
        ranks = self._read(ctx)
        split_bytes = sum(shard.size_bytes for shard in ctx.manifest.shards_of("train"))
        return summarized(dict(values), prepare_s, ranks, split_bytes)

    def _load(self, values: Mapping[str, Any]) -> LoadedSpec:
        more = [as_override(key, value) for key, value in values.items()]
        return load_spec(self._loaded.file, [*self._loaded.overrides, *more])

    def _context(self, loaded: LoadedSpec, project: Project, *, stages: bool) -> RunContext:
        """What stages work with, of a run that is on no record."""
        ledger = Ledger(project.storage)
        return RunContext(
            project=project,
            keys=stage_keys(project, ledger.stage_output),
            ledger=ledger,
            run=ledger.new_run(loaded.spec.name, loaded.spec.model_dump(mode="json", by_alias=True)),
            attempt=Attempt(number=1, process=ProcessIdentity.current(), started=utc_now()),
            tracker=cast(Tracker, _Untracked()),
            reporter=_Quiet(self._reporter, stages),
            state_dir=loaded.state_dir,
            need_ray=self._need_ray,
            stopping=self._stopping,
        )

    def _read(self, ctx: RunContext) -> list[RankReading]:
        own_cluster = ctx.need_ray()
        with scratch_folder(ctx.storage) as scratch:
            job = replace(make_job(ctx), run_storage=scratch)
            self._stopping.graceful = True
            try:
                work = partial(read_rank, limit_s=self._limit_s)
                train(job, stop=self._stopping.stop, listener=_deaf, own_cluster=own_cluster, work=work)
                self._stopping.check()
                return readings_of(scratch)
            finally:
                self._stopping.graceful = False


@contextmanager
def scratch_folder(storage: Storage) -> Iterator[Storage]:
    """A folder for what the ranks of a probe measure, deleted with those of probes that were killed."""
    for name in storage.list("probes"):
        if current_holder(storage, f"probes/{name}/lease") is None:
            storage.delete(f"probes/{name}")
    own = f"probes/{uuid.uuid4().hex[:12]}"
    try:
        with hold_lease(storage, f"{own}/lease"):
            yield storage.child(own)
    finally:
        storage.delete(own)


def _deaf(_events: list[Event]) -> None:
    """Events of training say nothing here; a failure is raised by `train` itself."""


def summarized(values: dict[str, Any], prepare_s: float, ranks: Sequence[RankReading], split_bytes: int) -> Reading:
    """One reading of all that its ranks saw; arguments as in `Reading`."""
    ordered = _shares([_spent(rank) for rank in ranks])
    place = next(iter(ordered))
    by_host: dict[str, int] = {}
    for rank in ranks:
        by_host[rank.host] = by_host.get(rank.host, 0) + rank.fetched_bytes
    if place == "fetch" and split_bytes and max(by_host.values()) > FETCHED_AGAIN * split_bytes:
        place = NODE_CACHE
    return Reading(
        values=values,
        prepare_s=prepare_s,
        rows_per_s=sum(rank.rows for rank in ranks) / (max(rank.seconds for rank in ranks) or 1e-9),
        worker_mib_per_s=sum(rank.bytes / 2**20 / (rank.seconds or 1e-9) for rank in ranks) / len(ranks),
        first_batch_s=max(rank.first_batch_s for rank in ranks),
        first_time=_shares([(rank.first_phases, rank.first_batch_s) for rank in ranks]),
        p50_s=median(rank.p50_s for rank in ranks),
        p95_s=max(rank.p95_s for rank in ranks),
        longest_s=max(rank.longest_s for rank in ranks),
        epochs=min(rank.epochs for rank in ranks),
        time=ordered,
        place=place,
        fetched_bytes=sum(by_host.values()),
        split_bytes=split_bytes,
        ranks=list(ranks),
    )


def _spent(rank: RankReading) -> tuple[dict[Phase, float], float]:
    """Seconds by phase, and in all, of one rank; opening the feed and starting Ray's processes come once in a training."""
    first: dict[Phase, float] = {name: seconds for name, seconds in rank.first_phases.items() if name != "tasks"}
    both = {name: first.get(name, 0.0) + rank.phases.get(name, 0.0) for name in PHASES}
    return both, sum(first.values()) + rank.phases_s


def _shares(of: Sequence[tuple[Mapping[Phase, float], float]]) -> dict[str, float]:
    """Share by place, the largest first, of (seconds by phase, seconds in all) of each rank."""
    total_s = sum(seconds for _, seconds in of) or 1e-9
    spent = {name: sum(phases.get(name, 0.0) for phases, _ in of) / total_s for name in PHASES}
    shares: dict[str, float] = {name: share for name, share in spent.items() if share > 0}
    shares[OTHER] = max(0.0, 1 - sum(shares.values()))
    return dict(sorted(shares.items(), key=lambda each: -each[1]))
