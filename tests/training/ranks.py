"""Several ranks without Ray: processes joined by gloo, which is what Ray Train sets up, at a tenth of the start-up time."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.training.job import TrainJob
from penstock.training.on_ray.worker import RankResult, run_rank
from penstock.training.ranks import Group
from tests.training.digits import CPU, ListClient

__all__ = ["run_ranks", "train_all", "train_ranks"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "ray.train.torch", "torchmetrics.classification", "penstock.training.on_ray.worker"])


def run_ranks(work: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 600.0) -> list[Any]:
    """Call `work(group, *args)` in `world_size` processes of one gloo group; returns what each returned, in rank order.

    `work` is a module's function. The first exception of a rank is raised here. `timeout_s` is that of collectives.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _CONTEXT.Process(target=_enter, args=(rank, world_size, folder, work, args, timeout_s), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        results = []
        for rank, process in enumerate(processes):
            answer = Path(folder, f"{rank}.pickle")
            assert answer.exists(), f"rank {rank} died with exit code {process.exitcode}"
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
