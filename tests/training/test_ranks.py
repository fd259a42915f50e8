"""How the loss of another rank shows on this one: real processes that train together, one of which is killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from penstock.training.ranks import is_lost_peer


def _dies_in_the_second_step(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.ones(2, 3)).sum().backward()
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_rank_is_detected_in_mid_backward(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    other = multiprocessing.get_context("spawn").Process(target=_dies_in_the_second_step, args=(store, 1))
    other.start()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
    try:
        model = DistributedDataParallel(torch.nn.Linear(3, 1))
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError) as lost:
            model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(RuntimeError) as own:
            torch.nn.Linear(3, 1)(torch.ones(2, 4))
        assert (is_lost_peer(lost.value), is_lost_peer(own.value)) == (True, False)
    finally:
        other.join()
        dist.destroy_process_group()
    assert other.exitcode == -signal.SIGKILL
