"""How does a compiled Keras model learn from penstock's rows? One `train_on_batch` a step.

`Model.fit` reads ahead in a thread of its own: after a kill it would be unknown which rows were learned.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.training.checkpoint.start_from import START
from penstock.training.frameworks.keras.library import backend, build, choose_backend, import_keras, inputs_of
from penstock.training.frameworks.keras.loading import (
    OPTIMIZER,
    WEIGHTS,
    WHOLE,
    KerasModel,
    read_variables,
    variables_of,
    written_variables,
)
from penstock.training.frameworks.keras.unsaved import reporting_draws, unsaved_variables
from penstock.training.frameworks.loops.steps import learn_batches
from penstock.training.job import TrainJob
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues, collecting
from penstock.training.ranks import Group
from penstock.training.rng import capture_rng
from penstock.training.session.session import Session
from penstock.training.step.unsaved import Unsaved, unsaved_state

__all__ = ["fit"]

choose_backend()  # before the user's file, which may import Keras, is loaded


def fit(job: TrainJob, group: Group, session: Session) -> None:
    """Train to the end of the spec, as the only rank.

    Raises:
        StopAtCheckpoint: the driver has asked for a stop, and this state is saved.
    """
    keras = import_keras()
    from keras.src.backend.common.global_state import get_global_attribute

    keras.utils.set_random_seed(job.seed)
    if backend() == "tensorflow":
        import tensorflow

        tensorflow.config.experimental.enable_op_determinism()
        tensorflow.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())  # they decide the order of sums
    schema = job.manifest.feed_schema
    model = build(job.code, job.spec.params, schema)

    def given(batch: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Inputs and label of a batch, as Keras takes them."""
        label = batch[schema.label].numpy() if schema.label is not None else None
        return inputs_of(model, batch, schema, job.code.target), label

    # A model has variables after a first batch. Keras calls the user's loss to find its shape: not a step.
    first = next(iter(open_job_feed(job, "train", 0, 1, group.device).batches(0)))
    with collecting(OwnValues(None, "build")):
        model.test_on_batch(*given(first.columns))
    model.optimizer.build(model.trainable_variables)
    variables = {WEIGHTS: variables_of(model), OPTIMIZER: model.optimizer.variables}
    newest = session.get_checkpoint()
    if newest is not None:
        for name, theirs in variables.items():
            read_variables(Path(newest.path, name).read_bytes(), theirs, f"{name} of a checkpoint")
    elif job.spec.start_from is not None:
        read_variables(job.run_storage.read_bytes(START), variables[WEIGHTS], f"train.start_from: {job.spec.start_from}")

    internal = {*vars(keras.Model()), *vars(keras.Layer()), "training"} - {"_trainable"}
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    objects = {"recipe": job.code.load(), "optimizer": optimizer, "schedule": optimizer._learning_rate}
    objects |= {f"loss{number or ''}": each for number, each in enumerate(keras.tree.flatten(model.loss))}
    layers = [(layer.name, layer) for layer in model._flatten_layers()]
    saved = [*variables[WEIGHTS], *variables[OPTIMIZER]]

    def look() -> dict[str, object]:
        unseeded = getattr(get_global_attribute("global_seed_generator"), "state", None)  # which has a reason of its own
        return unsaved_state(model, objects, internal, layers) | unsaved_variables(model, [*saved, unseeded])

    outside = Unsaved(look)
    traced = iter([not model.run_eagerly and (model.jit_compile or backend() == "tensorflow")])

    def learn(batch: dict[str, Tensor]) -> dict[str, float]:
        model.reset_metrics()  # else the values are means since the start
        drawn = capture_rng(group.device) if next(traced, False) else None
        found = model.train_on_batch(*given(batch), return_dict=True)
        if drawn is not None and not torch.equal(drawn, capture_rng(group.device)):
            session.add_caveat("a traced step has constants of the random generator of Python or NumPy")
        outside.after_step()
        return {f"train/{name}": float(np.asarray(value)) for name, value in found.items()}

    def write(folder: Path) -> None:
        for name in outside.changed():
            session.add_caveat(f"{name.partition('#')[0]} is not a variable of the model")
        if get_global_attribute("global_seed_generator") is not None:
            session.add_caveat("keras.random without a seed draws from a generator that is in no checkpoint")
        for name, theirs in variables.items():
            (folder / name).write_bytes(written_variables(theirs))
        model.save(folder / WHOLE)

    with reporting_draws(session.add_caveat) if backend() == "tensorflow" else nullcontext():
        learn_batches(job, group, session, KerasModel(model, schema, job.code.target), learn, write)
