"""Which flavours of MLflow's own does a registered model have besides pyfunc? Those of the libraries that keep one file.

`mlflow.xgboost.load_model` and its like then give the library's own object, which takes prepared rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlflow.models import Model

from penstock.training.model import ModelSpec

__all__ = ["add_flavors"]

_FRAMEWORKS = "penstock.training.frameworks"

_FLAVORS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{_FRAMEWORKS}.xgboost.loading:load": (
        "xgboost",
        {"data": "artifacts/model.ubj", "model_class": "xgboost.core.Booster", "model_format": "ubj"},
    ),
    f"{_FRAMEWORKS}.lightgbm.loading:load": (
        "lightgbm",
        {"data": "artifacts/model.txt", "model_class": "lightgbm.basic.Booster"},
    ),
    f"{_FRAMEWORKS}.keras.loading:load": ("keras", {"data": "artifacts/model", "save_exported_model": False}),
}
"""Loader of the model -> name of the flavour, and what MLflow's loader of it reads."""

_VERSIONS = {"xgboost": "xgb_version", "lightgbm": "lgb_version", "keras": "keras_version"}


def add_flavors(model: ModelSpec, folder: Path) -> None:
    """Name them in the folder's MLmodel; nothing for the others."""
    if model.loader not in _FLAVORS:
        return
    name, configuration = _FLAVORS[model.loader]
    versions = {_VERSIONS[name]: next((version for own, version in model.requires.items() if own.startswith(name)), "")}
    description = Model.load(str(folder))
    description.add_flavor(name, **versions, **configuration)
    description.save(str(folder / "MLmodel"))
