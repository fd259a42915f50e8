"""Functions of the guides' shape in one process or two ranks, on rows that penstock has prepared, without a server."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
from ray.train.v2.api.context import LocalTrainContext

from penstock.errors import PenstockError
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.events import Event
from penstock.training.frameworks.ray_train.framework import RAY_TRAIN, run_loop_rank
from penstock.training.job import TrainJob
from penstock.training.on_ray.worker import RankResult
from penstock.training.ranks import Group
from penstock.training.session.session import Session
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture
from tests.ingest.preparing import Source
from tests.training.digits import CPU, ListClient
from tests.training.ranks import run_ranks

__all__ = [
    "Killed",
    "Prepared",
    "Ran",
    "checkpoints",
    "killed",
    "killed_and_continued",
    "prepare",
    "reports",
    "run_alone",
    "run_on_two",
]

HERE = Path(__file__).parent


@dataclass
class Ran:
    """What one rank's call of a function gave."""

    result: RankResult
    printed: list[str]
    events: list[Event]


@dataclass
class Prepared:
    """Rows of a source; `job` makes trainings on them."""

    source: Source
    manifest: Any

    def job(
        self,
        target: str,
        params: Mapping[str, Any] | None = None,
        *,
        run: str = "run",
        attempt: int = 1,
        base: Path = HERE,
        **train: Any,
    ) -> TrainJob:
        """A training by a function of a file of `base`; `train` are fields of the section."""
        spec = TrainSpec.model_validate({"loop": target, "params": dict(params or {}), **train})
        code = capture(target, base, spec.params)
        RAY_TRAIN.check(code, spec)
        order = make_order(ShuffleSpec(seed=17), self.manifest.rows["train"])
        return TrainJob(
            run_storage=Storage(str(self.source.folder / run)),
            data_storage=self.source.storage,
            manifest=self.manifest,
            order=order,
            spec=spec,
            seed=17,
            code=code,
            attempt=attempt,
            pipeline="guide",
            data_config=capture(spec.datasets, base) if isinstance(spec.datasets, str) else None,
            identity={"data": self.manifest.content_digest, "order": order.fingerprint},
        )


def prepare(folder: Path, rows: Mapping[str, pa.Table], steps: Sequence[Any] = (), **data: Any) -> Prepared:
    """Prepare tables by split, as `penstock run` would before training."""
    files = {f"{split}/part-0.parquet": table for split, table in rows.items()}
    source = Source.of(folder, files, steps, **{split: split for split in rows}, **data)
    return Prepared(source, source.materialize())


def run_alone(job: TrainJob) -> Ran:
    """Run the function on one rank, in this process."""
    return _as_rank(Group(0, 1, CPU), job)


def run_on_two(job: TrainJob) -> list[Ran]:
    """Run the function on two ranks of one gloo group, each in a process of its own."""
    return run_ranks(_as_rank, 2, job)


def _as_rank(group: Group, job: TrainJob) -> Ran:
    ours = {"world_rank": group.rank, "local_rank": group.rank}
    context = LocalTrainContext("guide", world_size=group.world_size, local_world_size=group.world_size, **ours)
    printed, client = io.StringIO(), ListClient()
    with (
        mock.patch.object(Session, "get_context", lambda self: context),
        mock.patch.object(Session, "is_distributed", lambda self: False),  # Ray then asks torch for the device
        contextlib.redirect_stdout(printed),
    ):
        result = run_loop_rank(job, group, client)
    return Ran(result, printed.getvalue().splitlines(), client.events)


@dataclass
class Killed:
    """A training to be killed, in its batch or its report of that number, from 1, and the same one undisturbed."""

    whole: TrainJob
    parts: TrainJob
    batch: int = 0
    report: int = 0


def killed_and_continued(*cases: Killed) -> list[list[tuple[Ran, Ran]]]:
    """Run each undisturbed, and again with a kill and a second attempt; of each rank what the first and the last gave."""
    if cases[0].whole.spec.workers == 1:
        return [_both(Group(0, 1, CPU), cases)]
    return run_ranks(_both, 2, cases)


def _both(group: Group, cases: Sequence[Killed]) -> list[tuple[Ran, Ran]]:
    found = []
    for case in cases:
        first = _as_rank(group, case.whole)
        with killed(batch=case.batch, report=case.report):
            _as_rank(group, case.parts)
        found.append((first, _as_rank(group, replace(case.parts, attempt=2))))
    return found


@contextlib.contextmanager
def killed(*, batch: int = 0, report: int = 0) -> Iterator[None]:
    """Let the function end in its batch or its report of that number, from 1, without a line of its own that knows of it."""
    name, number = ("_passed", batch) if batch else ("report", report)
    does: Callable[..., None] = getattr(Session, name)
    count = 0

    def dies(self: Session, *given: Any, **named: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise KilledError(f"killed at number {number}")
        does(self, *given, **named)

    with mock.patch.object(Session, name, dies), contextlib.suppress(KilledError):
        yield
        raise AssertionError(f"the function ended before number {number}")


class KilledError(PenstockError):
    """Stands for the end of the process."""


def checkpoints(job: TrainJob) -> list[Checkpoint]:
    """Those that are kept, the newest first."""
    return job_checkpoints(job).committed()


def reports(job: TrainJob, name: str) -> list[float]:
    """The charted values of a name, in order."""
    return [point.values[name] for point in read_journal(job.run_storage, 10**6) if name in point.values]
