"""How is the user's Keras model built, and how is a batch of the feed passed to it? Without Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from penstock.errors import SpecError, TrainingError
from penstock.ingest.schema import FeedSchema
from penstock.training.frameworks.on_workers import installed
from penstock.training.recipe import build_by_user
from penstock.usercode.capture import UserCode

__all__ = ["TENSORFLOW", "backend", "build", "choose_backend", "import_keras", "inputs_of"]

TENSORFLOW = ("tensorflow", "tensorflow-cpu")
"""Distributions of TensorFlow."""


def backend() -> str:
    """Keras' backend: KERAS_BACKEND, else TensorFlow where it is installed, else torch."""
    return os.environ.get("KERAS_BACKEND") or ("tensorflow" if installed(*TENSORFLOW) else "torch")


def choose_backend() -> None:
    """Set that backend for every import of Keras in this process; the user's file may be the first to import it."""
    os.environ["KERAS_BACKEND"] = backend()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else every worker prints four lines


def import_keras() -> Any:
    """Keras, on CPUs."""
    choose_backend()
    import keras

    if backend() == "tensorflow":
        import tensorflow

        tensorflow.config.set_visible_devices([], "GPU")
    return keras


def build(code: UserCode, params: Mapping[str, Any], schema: FeedSchema) -> Any:
    """Call the user's function with (schema, **params), for a compiled model.

    Raises:
        SpecError: the function returns something else, or `train.params` do not fit.
    """
    keras = import_keras()
    function = code.load()
    model = build_by_user(code, lambda: function(schema, **code.located(params)))
    if not isinstance(model, keras.Model):
        raise SpecError(f"train.recipe: {code.target} made a {type(model).__name__}, not a keras.Model")
    if not model.compiled:
        raise SpecError(
            f"train.recipe: the model of {code.target} is not compiled", next_step="call model.compile(optimizer, loss) in it"
        )
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if optimizer.use_ema and not optimizer.ema_overwrite_frequency:
        raise SpecError(
            f"train.recipe: the optimizer of {code.target} has use_ema: only Model.fit puts the averages into the weights",
            next_step="set ema_overwrite_frequency, too, or take use_ema out",
        )
    return model


def inputs_of(model: Any, batch: Mapping[str, Tensor], schema: FeedSchema, target: str) -> Any:
    """Choose the model's inputs: the only column, or the columns with the names of its inputs. NumPy arrays.

    Raises:
        TrainingError: no column has an input's name.
    """
    columns = {name: column.cpu().numpy() for name, column in batch.items() if name != schema.label}
    if len(columns) == 1:
        return next(iter(columns.values()))
    names = [str(one.name) for one in model.inputs] if model.built and model.inputs else []
    absent = [name for name in names if name not in columns]
    if not names or absent:
        raise TrainingError(
            f"{target}: the model's inputs are {', '.join(map(repr, names)) or 'not named'}, "
            f"and the rows have {', '.join(map(repr, columns))}",
            next_step="name each keras.Input like the column that it takes, or make one column of them (concatenator)",
        )
    return columns[names[0]] if len(names) == 1 else {name: columns[name] for name in names}
