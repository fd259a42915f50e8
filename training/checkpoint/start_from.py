"""Which weights does a training begin with, if not with fresh ones? Those of a file, an earlier run, or a registered model."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from penstock.digest import file_digest
from penstock.errors import CheckpointError, SpecError, TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint.state_files import MODEL
from penstock.training.checkpoint.store import CheckpointStore

__all__ = ["START", "StartWeights", "find_start", "load_matching", "start_weights"]

START = "start_from"
"""The file in a run's storage, from which all workers read."""

_SHOWN = 6


@dataclass(frozen=True)
class StartWeights:
    """What `train.start_from` names."""

    name: str
    """As it is written, or `models:/name/3` where an alias is."""
    digest: str
    """Of the content: the train stage's key holds it, not the name."""
    read: Callable[[], bytes]
    """Fetches the file."""


def find_start(name: str, base_dir: Path, storage: Storage) -> StartWeights:
    """Look up the file or run that `train.start_from` names; nothing is loaded.

    Args:
        name: a file (`.safetensors`, `.pt`, `.pth`) relative to `base_dir`, or `run:<run>` of `storage`.

    Raises:
        SpecError: there is no such thing.
    """
    if name.startswith("run:"):
        store = CheckpointStore(storage.child(f"runs/{name.removeprefix('run:')}"))
        newest = next(iter(store.committed()), None)
        if newest is None or MODEL not in newest.manifest.files:
            raise SpecError(
                f"train.start_from: {name!r} is no run with a torch model in {storage.uri('')}",
                next_step="penstock status lists the runs (a cleaned one has no weights any more); a registered model is "
                "models:/NAME@ALIAS or models:/NAME/VERSION",
            )
        return StartWeights(name, newest.manifest.weights_digest, partial(newest.storage.read_bytes, MODEL))
    file = base_dir / name
    if not file.is_file() or file.suffix not in (".safetensors", ".pt", ".pth"):
        raise SpecError(
            f"train.start_from: {name!r} is no file of weights in {base_dir}",
            next_step="name a .safetensors, .pt or .pth file, run:<run>, or a registered model as models:/NAME@ALIAS",
        )
    return StartWeights(name, file_digest(file), file.read_bytes)


def start_weights(run_storage: Storage) -> dict[str, Tensor]:
    """The weights that were put into the run's storage.

    Raises:
        CheckpointError: they cannot be read; nothing is unpickled but tensors.
    """
    content = run_storage.read_bytes(START)
    try:
        if content[:2] == b"PK":  # torch.save's zip
            loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            state = loaded.get("state_dict", loaded.get("model", loaded))
            return {name: value for name, value in state.items() if isinstance(value, Tensor)}
        return safetensors.torch.load(content)
    except Exception as error:  # both libraries have many
        raise CheckpointError(
            f"train.start_from: the weights cannot be read: {str(error).splitlines()[0]}",
            next_step="save them with safetensors, or with torch.save(model.state_dict(), file)",
        ) from error


def load_matching(model: nn.Module, weights: Mapping[str, Tensor], name: str) -> str:
    """Copy into the model what fits by name and shape; says what matched, what is new in the model, and what was left.

    Raises:
        TrainingError: nothing fits.
    """
    own = model.state_dict()
    fits = {key: value for key, value in weights.items() if isinstance(own.get(key), Tensor) and own[key].shape == value.shape}
    new, left = [key for key in own if key not in fits], [key for key in weights if key not in fits]
    if not fits:
        raise TrainingError(
            f"train.start_from: none of the {len(weights)} weights of {name} fits the model",
            problems=[f"there: {_few([*weights])}", f"in the model: {_few([*own])}"],
            next_step="name weights of the same names and shapes, or rename them in the file",
        )
    with torch.no_grad():
        for key, value in fits.items():
            own[key].copy_(value)
    told = [f"{len(fits)} of {len(own)} weights are those of {name}"]
    told += [f"new: {_few(new)}"] if new else []
    told += [f"left: {_few(left)}"] if left else []
    return "; ".join(told)


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
