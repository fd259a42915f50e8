"""Do two batches train, report, save and load again? In a process of its own, of which nothing is kept.

The process runs a rank's own work, so that what it finds is what a run would find.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from penstock.config import Section
from penstock.errors import PenstockError, TrainingError
from penstock.machine.prints import keeping_prints, print_again
from penstock.messages import describe_error
from penstock.redact import hiding_secrets
from penstock.storage import Storage
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.events import Event, Point
from penstock.training.frameworks.on_workers import OnWorkers
from penstock.training.frameworks.registry import FRAMEWORKS
from penstock.training.frameworks.torch.one_batch import without_label
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, load_model
from penstock.training.on_ray.stacks import user_line
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.session.reported import OWN_PREFIXES

__all__ = ["ROWS", "RUN", "Tried", "try_apart"]

ROWS, RUN = "storage", "run"
"""Folders of the rows and of the run, below the sample's."""

LIMIT_S = 120.0
"""Time for two batches, with the code's imports and all that it loads."""


class Tried(Section):
    """What two batches have shown."""

    batches: int | None = None
    """Taken from the train split; None of a framework that counts its steps itself."""
    reported: tuple[str, ...] = ()
    """Names of the values that were reported."""
    checkpoint_bytes: int = 0
    """0 if no checkpoint was saved."""
    stuck: str = ""
    """Why it did not come to its end, and the line at which it was."""


def try_apart(framework: str, job: TrainJob, sample: Mapping[str, bytes] = MappingProxyType({})) -> Tried:
    """Train two batches in a process that ends with them, and print its lines.

    Args:
        sample: the files of the folder that holds `ROWS` and `RUN`, if this process does not see the storages of `job`.

    Raises:
        PenstockError: as in a run; an error of the user's code names its file and line.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as name:
        folder = Path(name)
        if sample:
            for file, content in sample.items():
                Storage(name).write_bytes(file, content)
            job = replace(job, data_storage=Storage(str(folder / ROWS)), run_storage=Storage(str(folder / RUN)))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if job.spec.gpus == 0:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        files = {part: folder / part for part in ("output", "stack", "result")}
        with files["output"].open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-P", "-c", f"from {__name__} import _main; _main()"],
                input=pickle.dumps((framework, job, files, LIMIT_S)),
                stdout=output,
                stderr=output,
                env=environment,
                check=False,
            )
        if files["result"].exists():
            found, printed = pickle.loads(files["result"].read_bytes())
            print_again(printed)
            if isinstance(found, PenstockError):
                raise found
            return Tried.model_validate(found)
        if files["stack"].exists() and (stack := files["stack"].read_text()):
            where = user_line(stack) or "a library's code"
            return Tried(stuck=f"after {LIMIT_S:g} s two batches were not done; the code was at {where}")
        last = files["output"].read_text(errors="replace").splitlines()[-5:]
        raise TrainingError(f"the process that tried two batches died with code {done.returncode}", problems=last)


def _main() -> None:
    framework, job, files, limit_s = pickle.load(sys.stdin.buffer)
    faulthandler.dump_traceback_later(limit_s, exit=True, file=files["stack"].open("w"))
    logging.disable(logging.INFO)  # of libraries
    found: Tried | PenstockError
    with keeping_prints() as printed:
        try:
            with hiding_secrets():
                found = _try(framework, job)
        except PenstockError as error:
            found = error
        except BaseException as error:  # user code may call sys.exit
            found = TrainingError(f"{job.code.target}: {describe_error(error)}")
    files["result"].write_bytes(pickle.dumps((found, printed.take())))
    os._exit(0)  # its threads may not end


def _try(name: str, job: TrainJob) -> Tried:
    framework, client = FRAMEWORKS.get(name), _Client()
    assert isinstance(framework, OnWorkers)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batches = framework.try_rank(job, Group(0, 1, device), client)
    checkpoint = next(iter(job_checkpoints(job).committed()), None)
    if checkpoint is None:
        return Tried(batches=batches, reported=tuple(client.names))
    schema, code = job.manifest.feed_schema, job.code
    with Recipe(framework, code.target).reraise_as_user_error("loading the checkpoint and predicting"), torch.no_grad():
        spec = ModelSpec(code=code, params=job.spec.params, feed_schema=schema, loader=framework.loader)
        model = load_model(spec, checkpoint.storage)
        batch = next(open_job_feed(job, "train", 0, 1, model.device).batches(0))
        model.loss(dict(batch.columns))
        if model.can_predict:
            without_label(lambda given: model.predict(given, batch.rows), dict(batch.columns), schema.label)
    return Tried(batches=batches, reported=tuple(client.names), checkpoint_bytes=checkpoint.manifest.size_bytes)


class _Client:
    """Keeps the names of the reported values; the rest goes nowhere."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def put(self, events: list[Event]) -> bool:
        for event in events:
            values = event.values if isinstance(event, Point) else {}
            self.names |= dict.fromkeys(name for name in values if not name.startswith(OWN_PREFIXES))
        return False
