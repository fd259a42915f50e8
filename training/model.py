"""How is a trained model loaded, evaluated and asked, whatever framework has trained it?

It is rebuilt from its files and a `ModelSpec`, by a function of its framework.
"""

from __future__ import annotations

import importlib
import sys
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from pydantic import Field, PositiveInt, ValidationError
from torch import Tensor

from penstock.config import Section
from penstock.errors import CheckpointError
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
from penstock.usercode.capture import UserCode

__all__ = [
    "ClassScores",
    "ModelSpec",
    "Predicts",
    "TrainedModel",
    "UsualPredicts",
    "are_probabilities",
    "load_model",
    "missing_part",
    "own_device",
    "read_spec",
]

ClassScores = Literal["logits", "probabilities"]

SUM_TOLERANCE = 0.02
"""Tolerance of the sum of probabilities: bfloat16 has three digits."""


def are_probabilities(scores: Tensor) -> bool:
    """Whether every row of [rows, classes] may be a distribution. Rows with NaN are ignored."""
    scores = scores.detach().float()
    wrong = (scores < 0).any(dim=1) | ((scores.sum(dim=1) - 1).abs() > SUM_TOLERANCE)
    return not bool(wrong.any())


def own_device() -> torch.device:
    """Choose the device of a model that this process loads: the GPU if there is one.

    Ray shows all GPUs of a node to work without a GPU of its own; there it is the CPU, as `train.gpus: 0` requires.
    """
    ray = sys.modules.get("ray")  # may not be installed
    if ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
        return torch.device("cuda" if ray.get_gpu_ids() and torch.cuda.is_available() else "cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Predicts(Protocol):
    """How a model predicts, known before it is trained, too. The defaults fit most frameworks."""

    @property
    def can_predict(self) -> bool:
        """Whether metrics other than the loss can be measured."""
        return True

    @property
    def predicts(self) -> ClassScores:
        """Kind of the predicted scores of classes: logits, or probabilities, which get no softmax."""
        return "logits"

    def metrics(self) -> dict[str, Any] | None:
        """Make its own torchmetrics by name; None leaves the choice to the label's kind."""
        return None

    @property
    def can_measure(self) -> bool:
        """Whether `measure` updates these metrics, instead of `update(predictions, label)`."""
        return False

    def measure(self, metrics: dict[str, Any], output: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Update its own metrics with one batch's predictions. Called if `can_measure` is true."""
        return None


def missing_part(model: Predicts) -> str:
    """Return the part of the user's code that a model which cannot predict lacks."""
    return getattr(model, "predicts_by", "a method predict(model, batch) in the recipe")


class UsualPredicts(Predicts):
    """The defaults, for a model that cannot be made before the schema is known."""


class TrainedModel(Predicts, Protocol):
    """A model with its weights. `batch` maps columns to tensors as the feed delivers them, rows first, on `device`."""

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return torch.device("cpu")

    @abstractmethod
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute the mean loss over the batch's rows, a scalar."""

    def importance(self) -> dict[str, float]:
        """Share of each column in the predictions, 1 in all, by name; empty if unknown."""
        return {}

    @abstractmethod
    def predict(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """Predict, rows first: scores [rows, classes], or [rows] of two classes, of the kind `predicts`; values [rows].

        Args:
            rows: of the batch; a packed column's tensor is longer. The label is absent where a registered model answers.

        Raises:
            TrainingError: the model cannot predict, or does not return a tensor.
        """


class ModelSpec(Section):
    """The description that a model is rebuilt from, with its files: `model.json` of a registered model."""

    version: Literal[1] = 1
    code: UserCode
    """The code of `train.recipe`."""
    params: dict[str, Any]
    feed_schema: FeedSchema
    loader: str
    """`module:function`, called with (this, storage rooted at the folder of the model's files) -> TrainedModel."""
    requires: dict[str, str] = Field(default_factory=dict)
    """Distribution -> version that the loader needs besides penstock."""
    raw: dict[str, Any] | None = None
    """Preparation of raw rows (`penstock.training.registry.raw_rows.RawForm`); the framework's model takes prepared ones."""
    batch_rows: PositiveInt = 1024
    """Rows of a batch when it answers, as when it was evaluated: another size may round differently."""


def read_spec(file: Path) -> ModelSpec:
    """Read the `model.json` of a registered model. Raises CheckpointError if another version of penstock wrote it."""
    try:
        return ModelSpec.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise CheckpointError(
            f"{file} does not describe a model of this penstock: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            next_step="load it with the penstock that registered it, or train and register it again",
        ) from error


def load_model(spec: ModelSpec, files: Storage | None) -> TrainedModel:
    """Rebuild a model in this process.

    Args:
        files: rooted at a folder that holds the model's files: a checkpoint's, or a registered model's. None makes an
            untrained model, where the framework's loader does.

    Raises:
        SpecError: the user's code cannot be loaded.
        CheckpointError: the files do not fit it.
    """
    module, _, function = spec.loader.partition(":")
    model: TrainedModel = getattr(importlib.import_module(module), function)(spec, files)
    return model
