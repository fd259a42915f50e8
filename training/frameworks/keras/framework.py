"""How does a compiled Keras model train in one worker?"""

from __future__ import annotations

import math

from penstock.errors import PreflightError, SpecError, TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.keras.library import TENSORFLOW, backend, build, choose_backend, inputs_of
from penstock.training.frameworks.keras.loading import WEIGHTS, WHOLE, KerasModel
from penstock.training.frameworks.loops.own_loop import OwnLoop, installed, refuse_unread, require_installed
from penstock.training.model import Predicts, UsualPredicts
from penstock.training.rng import seed_rng
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["KERAS", "KerasFramework"]

_UNREAD = {
    "learning_rate": "the optimizer that the model is compiled with has one",
    "clip_norm": "the optimizer has global_clipnorm",
    "accumulate": "the optimizer has gradient_accumulation_steps",
    "precision": "call keras.config.set_dtype_policy where the model is built",
    "compile": "compile(jit_compile=True) does it",
    "callbacks": "schedules are the optimizer's; the best checkpoint is train.checkpoint.best",
    "last_batch": "the last batch of an epoch is kept",
}
"""Field that is not read -> the way to do it here."""


class KerasFramework(OwnLoop):
    """See `penstock.training.frameworks.framework.Framework`."""

    loader = "penstock.training.frameworks.keras.loading:load"
    model_files = (WEIGHTS, WHOLE)
    fit = "penstock.training.frameworks.keras.loop:fit"
    on_cpus = True

    @property
    def libraries(self) -> tuple[str, ...]:
        """Keras and its installed backend."""
        there = require_installed("keras", "keras")
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
        refuse_unread(spec, _UNREAD)
        _ = self.libraries
        if spec.workers > 1:
            raise SpecError(
                f"train.workers: {spec.workers} with train.framework: keras, which trains in one worker: "
                "Keras 3 does not learn under tf.distribute.MultiWorkerMirroredStrategy",
                next_step="set train.workers: 1 and raise train.cpus_per_worker, or write a function for Ray Train with "
                "Keras 2 (train.loop: docs/ray-train.md)",
            )
        if spec.gpus not in ("auto", 0):
            raise SpecError(
                f"train.gpus: {spec.gpus} with train.framework: keras, which trains on CPUs here", next_step="set 0"
            )
        choose_backend()
        function = code.load()
        if isinstance(function, type) or not callable(function):
            raise SpecError(f"train.recipe: {code.target} is not a function (schema, **params) that returns a compiled model")
        return UsualPredicts()

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Train one step, and predict."""
        seed_rng(seed)
        module = build(code, spec.params, schema)
        model = KerasModel(module, schema, code.target)
        columns = dict(batch.columns)
        label = columns[schema.label].numpy() if schema.label is not None else None
        value = float(module.train_on_batch(inputs_of(module, columns, schema, code.target), label, return_dict=True)["loss"])
        if not math.isfinite(value):
            raise TrainingError(
                f"{code.target}: the loss of the first batch is {value}",
                next_step="check the columns' values (scale, missing values) and the model's loss",
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


KERAS = KerasFramework()
