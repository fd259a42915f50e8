"""Is a fault that may pass tried again, and a bug not, in a real worker that raises it?"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from penstock.errors import PenstockError, TrainingError
from penstock.training.on_ray.trainer import train
from penstock.training.on_ray.worker import RankResult
from penstock.usercode.capture import capture
from tests.runs.forked import fork_workers_from_here
from tests.training.digits import make_job

pytestmark = pytest.mark.slow

RECIPE = """\
import errno
import os
from pathlib import Path

import torch
from torch import nn

from penstock.errors import ServiceError


class Faulty:
    def __init__(self, kind, folder, ranks=1):
        self.kind, self.ranks, self.tries = kind, ranks, Path(folder, "tries")
        self.tries.write_text((self.tries.read_text() if self.tries.exists() else "") + "x")

    def build_model(self, schema):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, schema.num_classes))

    def loss(self, model, batch):
        errors = {
            "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free"),
            "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "assert": RuntimeError("CUDA error: device-side assert triggered"),
            "illegal": RuntimeError("CUDA error: an illegal memory access was encountered"),
            "ecc": RuntimeError("CUDA error: uncorrectable ECC error encountered"),
            "reset": ConnectionResetError("by peer"),
            "disk": OSError(errno.EIO, "Input/output error"),
            "missing": FileNotFoundError("words.txt"),
            "bug": ValueError("a wrong shape"),
            "store": ServiceError("S3 fails for bucket 'b'"),
        }
        errors["store"].transient = True
        if self.kind == "assert":  # the process dies before its exception has reached Ray
            torch.distributed.destroy_process_group = lambda: os._exit(1)
        if self.kind in errors and (len(self.tries.read_text()) <= self.ranks or self.kind in ("memory", "bug", "assert")):
            raise errors[self.kind]
        return nn.functional.cross_entropy(model(batch["image"]), batch["label"])
"""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    fork_workers_from_here()
    ray.shutdown()
    ray.init("local", num_cpus=2, resources={"tape": 2}, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def run(folder: Path, kind: str, work: Any = None, **more: Any) -> tuple[PenstockError | None, int]:
    """The error of an attempt that raises `kind`, and how often its workers were started."""
    (folder / "faulty.py").write_text(RECIPE)
    params = {"kind": kind, "folder": str(folder), "ranks": more.get("workers", 1)}
    job = make_job(folder, max_steps=2, params=params, **more)
    job = replace(job, code=capture("faulty.py:Faulty", folder, params), open_feeds=None)
    error = None
    try:
        train(job, stop=threading.Event(), listener=lambda _events: None, work=work)
    except PenstockError as raised:
        error = raised
    tries = folder / "tries"
    return error, len(tries.read_text()) if tries.exists() else 0


@pytest.mark.parametrize("kind", ["ecc", "reset", "disk", "store"])
def test_fault_that_may_pass_is_tried_again(tmp_path: Path, kind: str) -> None:
    assert run(tmp_path, kind) == (None, 2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("memory", "too little memory for a step: CUDA out of memory"),
        ("cublas", "too little memory for a step: CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        ("assert", "a check on the GPU failed"),
        ("illegal", r"an illegal memory access was encountered \(.*faulty\.py:\d+ in loss"),
        ("missing", r"FileNotFoundError: words\.txt \(.*faulty\.py:\d+ in loss"),
        ("bug", r"ValueError: a wrong shape \(.*faulty\.py:\d+ in loss"),
    ],
)
def test_error_that_a_restart_would_meet_ends_at_once(tmp_path: Path, kind: str, message: str) -> None:
    error, tries = run(tmp_path, kind)
    assert isinstance(error, TrainingError), (error, tries)
    assert tries == 1 or kind == "assert"  # whose process died: Ray starts it again until the driver ends that
    assert re.search(message, error.message)
    if kind in ("memory", "cublas"):
        assert all(f"train.{each}" in error.next_step for each in ("batch_rows", "accumulate", "precision"))


def runs_out_of_memory(*_given: Any, **_more: Any) -> RankResult:
    raise RuntimeError("CUDA error: out of memory")


def test_memory_error_outside_of_user_code_has_advice(tmp_path: Path) -> None:
    error, _ = run(tmp_path, "none", work=runs_out_of_memory)
    assert error is not None and "train.accumulate" in error.next_step


def test_retries_used_up_show_the_users_line(tmp_path: Path) -> None:
    error, tries = run(tmp_path, "reset", retries=0)
    assert tries == 1 and error is not None
    assert error.message.startswith("training failed: rank 0") and "faulty.py" in error.message


def test_nccl_on_cpus_is_refused(tmp_path: Path) -> None:
    error, tries = run(tmp_path, "none", backend={"name": "nccl"})
    assert tries == 0 and error is not None and "needs a GPU for each worker" in error.message


@pytest.mark.drill
def test_passing_fault_of_one_of_two_ranks_restarts_both(tmp_path: Path) -> None:
    more = {"resources": {"tape": 1}, "placement": "SPREAD", "backend": {"init_method": "tcp", "timeout_s": 60}}
    error, tries = run(tmp_path, "reset", workers=2, **more)
    assert error is None and tries > 2
