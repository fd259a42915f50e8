"""How does a function for Ray Train train in the pipeline? The loop is its own; rows, checkpoints and charts are penstock's."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ray
import torch

from penstock.errors import SpecError, TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema, Split
from penstock.training.callbacks.early_stopping import EARLY_STOPPING, EarlyStopping
from penstock.training.checkpoint.folder import FOLDER
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.on_workers import OnWorkers
from penstock.training.frameworks.ray_train.loading import LoopModel
from penstock.training.frameworks.ray_train.old_names import refuse_old_names
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import MailboxClient
from penstock.training.model import Predicts
from penstock.training.on_ray.worker import RankResult
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.session.attempt import run_session
from penstock.training.session.session import Session, StopAtCheckpoint
from penstock.training.session.shard import Shard
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["RAY_TRAIN", "RayTrainFramework", "run_loop_rank"]

_UNREAD = (
    *("epochs", "max_steps", "batch_rows", "precision", "compile", "accumulate", "clip_norm", "learning_rate"),
    *("validate_every_steps", "last_batch"),
)
"""Fields that a user's loop does not read."""

_OTHER_WAYS = re.compile(r"collate|\b(iter_batches|iter_rows|to_torch|to_tf|iter_tf_batches|iter_jax_batches)\b")
"""By which rows with text or times can be taken."""

TRIED_BATCHES = 2


class RayTrainFramework(OnWorkers):
    """See `penstock.training.frameworks.framework.Framework`."""

    libraries = ("torch", "ray")
    loader = "penstock.training.frameworks.ray_train.loading:load"
    model_files = (FOLDER,)
    a_step = "what the function does with one batch, of a size that it chooses"
    in_ray_train = True

    @property
    def run_rank(self) -> Callable[..., RankResult]:
        """Calls the function in a session."""
        return run_loop_rank

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import the function; refuse settings that only a recipe's loop reads."""
        refuse_old_names(code.files)
        function = code.load()
        if isinstance(function, type) or not callable(function):
            raise SpecError(
                f"train.loop: {code.target} is a {'class' if isinstance(function, type) else type(function).__name__}, "
                "not a function",
                next_step="a class with build_model and loss is a recipe: train.recipe",
            )
        options = dict(spec.named_callbacks)
        asked = spec.set_by_user(_UNREAD if options.keys() <= {EARLY_STOPPING} else (*_UNREAD, "callbacks"))
        if asked:
            raise SpecError(
                f"train.loop: {code.target} has its own loop, which does not read "
                + " and ".join(f"train.{name}" for name in asked),
                problems=["of train.callbacks a loop takes early_stopping alone"] if "callbacks" in asked else [],
                next_step="put it into train.params, which the function gets as its config",
            )
        EarlyStopping(**options.get(EARLY_STOPPING, {}))  # refuses what does not fit
        module = sys.modules[function.__module__]
        return LoopModel(True if hasattr(module, "load_model") else None, module, code.target)

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Try the rows alone: a loop cannot be called for one batch, and `penstock check` calls it for two."""
        if batch.arrow and _takes_plain_tensors(code):  # else the first batch of a worker is refused, a minute later
            feed = SimpleNamespace(batches=lambda epoch, start: iter([batch]))
            shard = Shard("train", schema, batch.rows, 1, lambda rows, device: feed, torch.device("cpu"))
            next(iter(shard.iter_torch_batches(batch_size=batch.rows)))
        return TriedBatch(loss=None, parameters=0, predict_shape=None)

    def try_rank(self, job: TrainJob, group: Group, client: Any) -> int:
        """Call the function until it reports a checkpoint, or requests a third batch of the train split.

        Each pass over a dataset ends after two batches.
        """
        import ray.train.torch  # noqa: F401  # as in Ray Train's workers; the function may not

        feeds = _ShortFeeds()
        run_session(replace(job, open_feeds=feeds), group, client, lambda session: _try(job, session, feeds))
        return feeds.taken


def _takes_plain_tensors(code: UserCode) -> bool:
    """Whether the function takes its rows by `iter_torch_batches` alone, and nothing in its files is a `collate_fn`."""
    text = "\n".join(text for path, text in code.files.items() if path.endswith(".py"))
    return "iter_torch_batches" in text and not _OTHER_WAYS.search(text)


def run_loop_rank(job: TrainJob, group: Group, client: MailboxClient, *, stop: bool = False, restart: int = 0) -> RankResult:
    """Call the user's function as one rank of `group`. A collective; arguments as of on_ray/worker.py's `run_rank`.

    Raises:
        TrainingError: the function fails, or ends without a checkpoint.
    """
    if group.world_size > 1 and any("tensorflow" in text for text in job.code.files.values()):
        _join_tensorflow(group)
    return run_session(job, group, client, lambda session: _call(job), stop=stop, restart=restart)


def _join_tensorflow(group: Group) -> None:
    """Give TensorFlow the workers' addresses for MultiWorkerMirroredStrategy, as Ray's TensorflowTrainer does. A collective."""
    with socket.socket() as free:
        free.bind(("", 0))
        own = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    workers = [each["address"] for each in group.everyones({"address": own})]
    cluster = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": group.rank}}
    # Keras 3 does not learn under that strategy; Keras 2 is the package tf-keras.
    os.environ.update({"TF_CONFIG": json.dumps(cluster), "TF_USE_LEGACY_KERAS": "1"})


def _call(job: TrainJob) -> Any:
    function = job.code.load()
    if not callable(function):
        raise TrainingError(f"train.loop: {job.code.target} is not a function")
    given = [job.code.located(dict(job.spec.params))] if inspect.signature(function).parameters else []
    with Recipe(function, job.code.target).reraise_as_user_error("train_func"):
        return function(*given)


def _try(job: TrainJob, session: Session, feeds: _ShortFeeds) -> None:
    report = session.report

    def report_once(**given: Any) -> None:
        report(**given)
        if given.get("checkpoint") is not None and feeds.taken != 1:
            raise StopAtCheckpoint

    session.report = report_once  # type: ignore[assignment,method-assign]
    try:
        _call(job)
    except TrainingError as error:
        # A loop that counts its batches, and calls next() for each, finds fewer than in a run.
        if not (feeds.cut and isinstance(error.__cause__, StopIteration)):
            raise
    if feeds.cut:  # the checkpoint may come after more batches
        raise StopAtCheckpoint


class _ShortFeeds:
    """Opens feeds whose epochs end after two batches; a third batch of the train split leaves the function.

    Attributes:
        taken: number of batches of the train split.
        cut: an epoch ended early.
    """

    def __init__(self) -> None:
        self.taken, self.cut = 0, False

    def __call__(self, job: TrainJob, split: Split, rank: int, world_size: int) -> Any:
        whole = open_job_feed(replace(job, open_feeds=None), split, rank, world_size, torch.device("cpu"))
        return _ShortFeed(whole, self, split == "train")


class _ShortFeed:
    def __init__(self, whole: Any, feeds: _ShortFeeds, trains: bool) -> None:
        self._whole, self._feeds, self._trains = whole, feeds, trains

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        for number, batch in enumerate(self._whole.batches(epoch, start)):
            if number == TRIED_BATCHES:
                self._feeds.cut = True
                return
            if self._trains and self._feeds.taken == TRIED_BATCHES:
                raise StopAtCheckpoint
            self._feeds.taken += self._trains
            yield batch


RAY_TRAIN = RayTrainFramework()
