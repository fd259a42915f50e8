"""How does a function for Ray Train train in the pipeline? The loop is its own; rows, checkpoints and charts are penstock's."""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
from collections.abc import Callable

import ray

from penstock.errors import SpecError, TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.on_workers import OnWorkers
from penstock.training.frameworks.ray_train.loading import LoopModel
from penstock.training.frameworks.ray_train.old_names import refuse_old_names
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import MailboxClient
from penstock.training.model import Predicts
from penstock.training.on_ray.worker import RankResult
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.session.attempt import run_session
from penstock.training.session.folder import FOLDER_FILE
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["RAY_TRAIN", "RayTrainFramework", "run_loop_rank"]

_UNREAD = (
    *("epochs", "max_steps", "batch_rows", "precision", "compile", "accumulate", "clip_norm", "learning_rate"),
    *("validate_every_steps", "last_batch", "callbacks", "start_from"),
)
"""Fields that a user's loop does not read."""


class RayTrainFramework(OnWorkers):
    """See `penstock.training.frameworks.framework.Framework`."""

    libraries = ("torch", "ray")
    loader = "penstock.training.frameworks.ray_train.loading:load"
    model_files = (FOLDER_FILE,)
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
        asked = spec.set_by_user(_UNREAD)
        if asked:
            raise SpecError(
                f"train.loop: {code.target} has its own loop, which does not read "
                + " and ".join(f"train.{name}" for name in asked),
                next_step="put it into train.params, which the function gets as its config",
            )
        module = sys.modules[function.__module__]
        return LoopModel(True if hasattr(module, "load_model") else None, module, code.target)

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Try nothing: a loop cannot be called for one batch."""
        return TriedBatch(loss=None, parameters=0, weights_bytes=0, checkpoint_bytes=0, predict_shape=None)


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


def _call(job: TrainJob) -> None:
    function = job.code.load()
    if not callable(function):
        raise TrainingError(f"train.loop: {job.code.target} is not a function")
    given = [job.code.located(dict(job.spec.params))] if inspect.signature(function).parameters else []
    with Recipe(function, job.code.target).reraise_as_user_error("train_func"):
        function(*given)


RAY_TRAIN = RayTrainFramework()
