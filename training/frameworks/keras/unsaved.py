"""Which state of a training with Keras is in no checkpoint? Besides the attributes that training/step/unsaved.py compares."""

from __future__ import annotations

import gc
import importlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.digest import bytes_digest
from penstock.training.frameworks.keras.library import backend

__all__ = ["reporting_draws", "unsaved_variables"]


def unsaved_variables(model: Any, saved: Sequence[Any]) -> dict[str, object]:
    """Return the values of this process's variables that are not `saved`, such as those of a loss or a second optimizer."""
    import keras

    model.reset_metrics()  # their values are of one step
    kinds = (keras.Variable, importlib.import_module("tensorflow").Variable if backend() == "tensorflow" else keras.Variable)
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]  # nothing else lists those of closures
    known = {id(each) for each in saved} | {id(each._value) for each in found if isinstance(each, keras.Variable)}
    loose = [each for each in found if id(each) not in known and getattr(each, "_value", each) is not None]
    values = [bytes_digest(pickle.dumps(keras.ops.convert_to_numpy(each))) for each in loose]
    return {f"{each.name.partition(':')[0]}#{id(each)}": value for each, value in zip(loose, values, strict=True)}


@contextmanager
def reporting_draws(report: Callable[[str], None]) -> Iterator[None]:
    """Call `report` when an operation of tf.random or tf.nn.dropout is made in the block: only TensorFlow has its state."""
    random_seed = importlib.import_module("tensorflow.python.framework.random_seed")
    get_seed = random_seed.get_seed  # these operations call it where they are traced, or run eagerly

    def reporting(op_seed: int | None) -> Any:
        report("tf.random draws from generators that are in no checkpoint")
        return get_seed(op_seed)

    random_seed.get_seed = reporting  # type: ignore[attr-defined]
    try:
        yield
    finally:
        random_seed.get_seed = get_seed  # type: ignore[attr-defined]
