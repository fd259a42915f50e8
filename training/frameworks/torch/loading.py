"""How is a trained torch model loaded, from a checkpoint or a registry? Without Ray."""

from __future__ import annotations

import safetensors.torch

from penstock.errors import CheckpointError
from penstock.storage import Storage
from penstock.training.checkpoint.manifest import MODEL
from penstock.training.checkpoint.state_files import with_extra
from penstock.training.model import ModelSpec, own_device
from penstock.training.recipe import RecipeModel, load_recipe

__all__ = ["load"]


def load(spec: ModelSpec, files: Storage) -> RecipeModel:
    """Load the recipe's model with its weights, in eval mode; on a GPU if this process has one.

    Args:
        files: of a checkpoint, or of a registered model, which has the weights alone.

    Raises:
        CheckpointError: the weights do not fit the model the recipe builds.
    """
    recipe = load_recipe(spec.code, spec.params)
    model = recipe.build_model(spec.feed_schema)
    local = files.is_local  # where the file can be mapped, it is not held in memory a second time
    weights = safetensors.torch.load_file(files.local_path(MODEL)) if local else safetensors.torch.load(files.read_bytes(MODEL))
    try:
        model.load_state_dict(with_extra(weights, model.state_dict()))
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {files.uri(MODEL)} do not fit {spec.code.target}: {error}") from error
    device = own_device()
    return RecipeModel(recipe, model.to(device).eval(), device)
