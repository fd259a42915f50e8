"""How is a trained LightningModule loaded, from a checkpoint or a registry? Without Ray."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from penstock.errors import CheckpointError, TrainingError
from penstock.storage import Storage
from penstock.training.frameworks.lightning.library import has_own, lightning_of, make_module, quiet
from penstock.training.model import ClassScores, ModelSpec, TrainedModel, own_device

__all__ = ["STATE", "TRAINER", "WEIGHTS", "LightningModel", "kept_state", "load", "steps_of"]

WEIGHTS, STATE, TRAINER = "model.safetensors", "state.pt", "trainer.ckpt"
"""In a checkpoint: the module's state_dict, the rest of what it answers by, and the Trainer's own checkpoint. The first two are
registered."""

STEPS, EXTRA = "estimated_stepping_batches", "extra_state"

_LOSSES = ("val/loss", "val_loss")
"""Names by which a module may log the loss of its validation."""

_HEAVY = ("state_dict", "optimizer_states", "lr_schedulers", "callbacks")


class LightningModel(TrainedModel):
    """See `penstock.training.model.TrainedModel`.

    A Trainer that does not train stands behind the module, which may ask it for its epoch or whether it checks sanity.

    Args:
        state: of the Trainer's checkpoint; None before training.
    """

    predicts_by = "a forward or a predict_step in the module"

    def __init__(self, module: Any, target: str, state: Mapping[str, Any] | None = None) -> None:
        self._module, self._target = module, target
        self._logged: dict[str, Any] = {}
        pl = lightning_of(type(module))
        steps = (state or {}).get(STEPS, 1)
        kind = type("Trainer", (pl.Trainer,), {"estimated_stepping_batches": steps})
        with quiet(pl):
            self._trainer = kind(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
        if state is not None:
            self._trainer.fit_loop.load_state_dict(state["loops"]["fit_loop"])
        module.trainer, module.log = self._trainer, self._log

    def set_up(self) -> None:
        """Call the hooks that may make layers, as the Trainer does before it loads weights."""
        with quiet(lightning_of(type(self._module))):
            self._module.setup("fit")
            self._module.configure_model()

    @property
    def can_predict(self) -> bool:
        """Whether the module has a `forward` or a `predict_step` of its own."""
        return has_own(self._module, "forward") or has_own(self._module, "predict_step")

    @property
    def predicts(self) -> ClassScores:
        """The module's `predicts`, else logits."""
        return getattr(self._module, "predicts", "logits")  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return torch.device(self._module.device)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of `validation_step`, else of `training_step`; NaN where neither has one.

        It is the value logged as `val/loss` or `val_loss`, the entry `loss` of a returned dict, or a returned number, unless
        that is logged under a name without "loss": a step may return its accuracy, or its logits.
        """
        found = self._step("validation_step", batch)
        loss = next((self._logged[name] for name in _LOSSES if name in self._logged), None)
        if loss is None and isinstance(found, dict):
            loss = found.get("loss")
        names = [name for name, value in self._logged.items() if value is found]
        if loss is None and isinstance(found, Tensor) and found.numel() == 1 and all("loss" in name for name in names):
            loss = found
        if loss is None and self._module.automatic_optimization:
            found = self._step("training_step", batch)
            loss = found.get("loss") if isinstance(found, dict) else found
        return loss.reshape(()) if isinstance(loss, Tensor) and loss.numel() == 1 else torch.tensor(torch.nan)

    def predict(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """Call `predict_step`, which by default is `forward`."""
        output = self._step("predict_step", batch)
        if not isinstance(output, Tensor):
            raise TrainingError(f"{self._target}.predict_step returned a {type(output).__name__}, not a tensor")
        return output

    def _step(self, name: str, batch: dict[str, Tensor]) -> Any:
        """Call a step with one batch, and its number where it takes that."""
        self._logged = {}
        step = getattr(self._module, name)
        takes = inspect.signature(step).parameters.values()
        numbered = len(takes) > 1 or any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in takes)
        return step(batch, 0) if numbered else step(batch)

    def _log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Stand in for the module's `log`."""
        self._logged[name] = torch.as_tensor(value) if isinstance(value, float | int) else value


def kept_state(checkpoint: Mapping[str, Any], extra: Mapping[str, Any], steps: float) -> bytes:
    """Encode the state that a trained module needs besides its weights: its own, its parts' extra state, and the loops'."""
    out = io.BytesIO()
    torch.save({STEPS: steps, EXTRA: extra, **{name: value for name, value in checkpoint.items() if name not in _HEAVY}}, out)
    return out.getvalue()


def steps_of(state: Path) -> float:
    """Return the number of steps for which schedules were made, from a file of `kept_state`."""
    return torch.load(state, weights_only=True)[STEPS]  # type: ignore[no-any-return]


def load(spec: ModelSpec, files: Storage) -> LightningModel:
    """Load the module with its weights, in eval mode; on a GPU if this process has one.

    Raises:
        CheckpointError: the weights do not fit the module.
    """
    module = make_module(spec.code, spec.params)
    weights = safetensors.torch.load(files.read_bytes(WEIGHTS))
    state = torch.load(io.BytesIO(files.read_bytes(STATE)), weights_only=True)
    model = LightningModel(module, spec.code.target, state)
    model.set_up()
    module.on_load_checkpoint({**state, "state_dict": weights})
    try:
        module.load_state_dict({**weights, **state[EXTRA]})
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {files.uri(WEIGHTS)} do not fit {spec.code.target}: {error}") from error
    device = own_device()
    module.to(device).eval()
    return model
