"""What does Keras do for the pipeline? It brings a compiled model, which learns in one worker."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

from penstock.errors import PreflightError, SpecError, TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.events import Event
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.keras.library import TENSORFLOW, backend, build, choose_backend, inputs_of
from penstock.training.frameworks.keras.loading import KerasModel
from penstock.training.frameworks.keras.state import WEIGHTS, WHOLE
from penstock.training.frameworks.own_loop import OwnLoop
from penstock.training.frameworks.own_trainer import installed, must_have, refuse_unread
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.model import Predicts
from penstock.training.rng import seed_rng
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["KERAS", "KerasFramework"]

_THE_MODELS = {
    "learning_rate": "the optimizer that the model is compiled with has one",
    "clip_norm": "the optimizer has global_clipnorm",
    "accumulate": "the optimizer has gradient_accumulation_steps",
    "precision": "call keras.config.set_dtype_policy where the model is built",
    "compile": "compile(jit_compile=True) does it",
    "callbacks": "schedules are the optimizer's; the best checkpoint is train.checkpoint.best",
    "last_batch": "the last batch of an epoch is kept",
    "start_from": "load weights where the model is built",
}
"""Field that is not read -> what does instead."""


class _NotBuilt(Predicts):
    """What can be measured of a model that will be there when the schema is known."""


class KerasFramework(OwnLoop):
    """See `penstock.training.frameworks.framework.Framework`."""

    loader = "penstock.training.frameworks.keras.loading:load"
    model_files = (WEIGHTS, WHOLE)
    fit = "penstock.training.frameworks.keras.loop:fit"

    @property
    def libraries(self) -> tuple[str, ...]:
        """Keras and its backend, as they are installed."""
        there = must_have("keras", "keras")
        if backend() == "tensorflow":
            found = installed(*TENSORFLOW)
            if not found:
                raise PreflightError(
                    "KERAS_BACKEND is tensorflow, which is not installed",
                    next_step='pip install "penstock[keras]", or set KERAS_BACKEND=torch',
                )
            return (*there, *found)
        return (*there, backend())

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import the function; refuse settings that only penstock's own loop reads, and more than one worker."""
        refuse_unread(spec, _THE_MODELS)
        _ = self.libraries
        if spec.workers > 1:
            raise SpecError(
                f"train.workers: {spec.workers} with train.framework: keras, which trains in one worker: "
                "Keras 3 does not learn under tf.distribute.MultiWorkerMirroredStrategy",
                next_step="set train.workers: 1 and raise train.cpus_per_worker, or take a recipe, lightning or transformers",
            )
        if spec.gpus not in ("auto", 0):
            raise SpecError(
                f"train.gpus: {spec.gpus} with train.framework: keras, which trains on CPUs here", next_step="set 0"
            )
        choose_backend()
        function = code.load()
        if isinstance(function, type) or not callable(function):
            raise SpecError(f"train.recipe: {code.target} is no function (schema, **params) that returns a compiled model")
        return _NotBuilt()

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """A step of training, and predict."""
        seed_rng(seed)
        module = build(code, spec.params, schema)
        model = KerasModel(module, schema, code.target)
        columns = dict(batch.columns)
        label = columns[schema.label].numpy() if schema.label is not None else None
        value = float(module.train_on_batch(inputs_of(module, columns, schema, code.target), label, return_dict=True)["loss"])
        if not math.isfinite(value):
            raise TrainingError(
                f"{code.target}: the loss of the first batch is {value}",
                next_step="look at the columns' values (scale, missing values), and at the model's loss",
            )
        shape = list(model.predict(columns, batch.rows).shape)
        parameters = int(module.count_params())
        return TriedBatch(
            loss=value,
            parameters=parameters,
            weights_bytes=parameters * 4,
            checkpoint_bytes=parameters * 16,
            predict_shape=shape,
        )

    def train(
        self,
        job: TrainJob,
        *,
        stop: threading.Event,
        listener: Callable[[list[Event]], None],
        own_cluster: bool = False,
    ) -> TrainOutcome:
        """Train on a Ray Train worker, on CPUs."""
        on_cpus = replace(job, spec=job.spec.model_copy(update={"gpus": 0}))
        return super().train(on_cpus, stop=stop, listener=listener, own_cluster=own_cluster)


KERAS = KerasFramework()
