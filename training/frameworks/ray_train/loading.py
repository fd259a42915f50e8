"""How is the model of a Ray Train function loaded? By `load_model(folder, config)` in its file."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint.folder import FOLDER, fetch_folder
from penstock.training.model import ClassScores, ModelSpec, TrainedModel

__all__ = ["LoopModel", "load"]


class LoopModel(TrainedModel):
    """See `penstock.training.model.TrainedModel`. Without `load_model` it cannot predict."""

    predicts_by = "a function load_model(folder, config) in the file of train.loop"

    def __init__(self, model: Any, module: Any, target: str) -> None:
        self._model, self._module, self._target = model, module, target

    @property
    def can_predict(self) -> bool:
        """Whether there is a model."""
        return self._model is not None

    @property
    def has_loss(self) -> bool:
        """Whether the file has a function `loss(model, batch)`."""
        return self._model is not None and callable(getattr(self._module, "loss", None))

    @property
    def predicts(self) -> ClassScores:
        """The file's `predicts`, else logits."""
        return getattr(self._module, "predicts", "logits")  # type: ignore[no-any-return]

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Call the file's `loss`; NaN without one."""
        if not self.has_loss:
            return torch.tensor(torch.nan)
        loss: Tensor = self._module.loss(self._model, batch)
        return loss.reshape(())

    def predict(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """Call the file's `predict(model, batch)`, else the model with the batch, or with its only column."""
        if self._model is None:
            raise TrainingError(
                f"{self._target}: its file has no load_model(folder, config), so its checkpoints cannot predict",
                next_step="add the function to the file; docs/ray-train.md has one",
            )
        own = getattr(self._module, "predict", None)
        if callable(own):
            return own(self._model, batch)  # type: ignore[no-any-return]
        return self._model(next(iter(batch.values())) if len(batch) == 1 else batch)  # type: ignore[no-any-return]


def load(spec: ModelSpec, files: Storage) -> LoopModel:
    """Call `load_model(folder, config)` with a reported folder; the model is in eval mode."""
    module = sys.modules[spec.code.load().__module__]
    make = getattr(module, "load_model", None)
    if not callable(make):
        return LoopModel(None, module, spec.code.target)
    with tempfile.TemporaryDirectory(prefix="penstock-loop-") as folder:
        fetch_folder(files, files.tree(FOLDER), Path(folder))
        model = make(folder, spec.code.located(spec.params))
    return LoopModel(model.eval() if isinstance(model, torch.nn.Module) else model, module, spec.code.target)
