"""How is a trained LightningModule loaded, from a checkpoint or a registry? Without Ray."""

from __future__ import annotations

import warnings
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from penstock.errors import CheckpointError, TrainingError
from penstock.storage import Storage
from penstock.training.frameworks.lightning.library import lightning_of, make_module
from penstock.training.model import ClassScores, ModelSpec, TrainedModel, own_device

__all__ = ["TRAINER", "WEIGHTS", "LightningModel", "load"]

WEIGHTS, TRAINER = "model.safetensors", "trainer.ckpt"
"""In a checkpoint: the module's state_dict, and the Trainer's own checkpoint. The first alone is registered."""


class LightningModel(TrainedModel):
    """See `penstock.training.model.TrainedModel`."""

    def __init__(self, module: Any, target: str) -> None:
        self._module, self._target = module, target

    @property
    def can_predict(self) -> bool:
        """Whether the module has a `forward` or a `predict_step` of its own."""
        base = lightning_of(type(self._module)).LightningModule
        return any(getattr(type(self._module), name) is not getattr(base, name) for name in ("forward", "predict_step"))

    @property
    def predicts(self) -> ClassScores:
        """The module's `predicts`, else logits."""
        return getattr(self._module, "predicts", "logits")  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return torch.device(self._module.device)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Call `validation_step`, else `training_step`, for a loss or a dict with one. NaN where neither returns one."""
        for name in ("validation_step", "training_step"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # self.log() warns without a Trainer
                found = getattr(self._module, name)(batch, 0)
            found = found.get("loss") if isinstance(found, dict) else found
            if isinstance(found, Tensor):
                return found.reshape(())
        return torch.tensor(torch.nan)

    def predict(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """Call `predict_step`, which by default is `forward`."""
        output = self._module.predict_step(batch, 0)
        if not isinstance(output, Tensor):
            raise TrainingError(f"{self._target}.predict_step returned a {type(output).__name__}, not a tensor")
        return output


def load(spec: ModelSpec, files: Storage) -> LightningModel:
    """Load the module with its weights, in eval mode; on a GPU if this process has one.

    Raises:
        CheckpointError: the weights do not fit the module.
    """
    module = make_module(spec.code, spec.params)
    weights = safetensors.torch.load(files.read_bytes(WEIGHTS))
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {files.uri(WEIGHTS)} do not fit {spec.code.target}: {error}") from error
    device = own_device()
    return LightningModel(module.to(device).eval(), spec.code.target)
