"""Several ranks without Ray: processes joined by gloo, which is what Ray Train sets up, at a tenth of the start-up time."""

from __future__ import annotations

import pickle
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.storage import Storage
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.job import TrainJob
from penstock.training.on_ray.worker import RankResult, run_rank
from penstock.training.ranks import Group
from tests.runs.forked import fork_rank
from tests.training.digits import CPU, ListClient

__all__ = ["check_continued", "run_ranks", "train_all", "train_ranks"]


def run_ranks(work: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 600.0) -> list[Any]:
    """Call `work(group, *args)` in `world_size` processes of one gloo group; returns what each returned, in rank order.

    `work` is a module's function. The first exception of a rank is raised here. `timeout_s` is that of collectives.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world_size):
            call = Path(folder, f"{rank}.call")
            call.write_bytes(pickle.dumps((_enter, rank, world_size, folder, work, args, timeout_s)))
            processes.append(fork_rank(call))
        codes = [process.wait() for process in processes]
        results = []
        for rank, code in enumerate(codes):
            answer = Path(folder, f"{rank}.pickle")
            assert answer.exists(), f"rank {rank} died with exit code {code}"
            results.append(pickle.loads(answer.read_bytes()))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def train_ranks(*jobs: TrainJob) -> list[RankResult]:
    """Train the jobs, which want equally many workers, one after the other in the same processes; rank 0's results."""
    return run_ranks(train_all, jobs[0].spec.workers, jobs)[0]  # type: ignore[no-any-return]


def train_all(group: Group, jobs: tuple[TrainJob, ...]) -> list[RankResult]:
    """Train the jobs as one rank of `group`."""
    return [run_rank(job, group, ListClient()) for job in jobs]


def _enter(rank: int, world_size: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size, timeout=limit)
    dist.barrier()  # a rank that leaves while another still connects to it would end that one before its work begins
    try:
        result = work(Group.current(CPU), *args)
    except Exception as error:
        result = error
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))
    if not isinstance(result, Exception):
        dist.destroy_process_group()


def check_continued(whole: TrainJob, train: Callable[[Group, list[TrainJob]], list[RankResult]]) -> list[Checkpoint]:
    """Two ranks train three epochs of the digits; others go on in the middle of an epoch, and at its end, to the same weights.

    Returns the checkpoints of the first two, the newest first.
    """
    (first,) = run_ranks(train, 2, [whole])[0]
    assert (first.status, first.state.step, first.state.epoch) == ("finished", 33, 3)
    there = job_checkpoints(whole).committed()
    assert [item.manifest.step for item in reversed(there)] == [4, 8, 11, 12, 16, 20, 22, 24, 28, 32, 33]
    folder = whole.run_storage.local_path(".")
    for step in (8, 11):
        job = replace(whole, run_storage=Storage(str(folder.parent / f"from-{step}")), attempt=2)
        shutil.copytree(folder, job.run_storage.local_path("."))
        for item in there:
            if item.manifest.step > step:
                shutil.rmtree(job.run_storage.local_path(f"checkpoints/{item.name}"))
        (result,) = run_ranks(train, 2, [job])[0]  # in processes of its own, as after a kill
        assert (result.resumed_from_step, result.state.step, result.exactness) == (step, 33, "bit-exact")
        newest = job_checkpoints(job).committed()[0]
        assert newest.manifest.weights_digest == there[0].manifest.weights_digest
        assert newest.manifest.metrics == there[0].manifest.metrics
    return there
