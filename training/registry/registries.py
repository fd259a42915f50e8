"""Which names may `tracking.registry` take?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.plugins import Plugins

if TYPE_CHECKING:  # a pipeline file is read without loading torch
    from penstock.training.registry.registry import ModelRegistry


__all__ = ["REGISTRIES"]


REGISTRIES: Plugins[ModelRegistry] = Plugins(
    "model registry",
    "penstock.registries",
    {"mlflow": "penstock.training.registry.mlflow_registry:MLFLOW"},
    needs=("libraries", "default_uri", "register", "missing"),
)
