"""What does a framework of one process say of its first batch?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import SpecError, TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.training.frameworks.loops.in_process import InProcess, LearningModel
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode
from tests.training.digits import SCHEMA

CODE = UserCode(target="model.py:Guess", digest="0", files={}, versions={})
BATCH = Batch({"label": torch.zeros(3, dtype=torch.int64)}, np.arange(3), 3, 3, 0, 3)


class Guess(LearningModel):
    """Says what it was made with of every row, and that this was its loss."""

    num_parameters = 1

    def __init__(self, value: float) -> None:
        self.value = value

    def predict(self, batch: dict[str, torch.Tensor], rows: int) -> torch.Tensor:
        return torch.full((rows, 10), self.value)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tensor(self.value)

    def learn(self, batch: dict[str, torch.Tensor]) -> float:
        return self.value

    def files(self) -> dict[str, bytes]:
        return {"guess": b"12345678"}


GUESS = InProcess(lambda code, params, schema, files: Guess(**params), (), "guess:load", ("guess",))


def tried(**params: Any) -> Any:
    return GUESS.try_batch(CODE, TrainSpec(recipe="model.py:Guess", params=params), SCHEMA, BATCH, 17)


def test_first_batch_gives_sizes_loss_and_predictions() -> None:
    found = tried(value=0.5)
    assert (found.loss, found.parameters, found.weights_bytes, found.predict_shape) == (0.5, 1, 8, [3, 10])


def test_wrong_params_and_nan_loss_are_refused_before_training() -> None:
    with pytest.raises(SpecError, match=r"train\.params do not fit model\.py:Guess"):
        tried(values=1.0)
    with pytest.raises(TrainingError, match=r"model\.py:Guess: the loss of the first batch is nan"):
        tried(value=math.nan)
