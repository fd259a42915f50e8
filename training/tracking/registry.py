"""Which names may `tracking.tracker` take?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.plugins import Plugins

if TYPE_CHECKING:  # a pipeline file is read without loading torch
    from penstock.training.tracking.tracker import Tracker

__all__ = ["TRACKERS"]

TRACKERS: Plugins[type[Tracker]] = Plugins(
    "tracker",
    "penstock.trackers",
    {"mlflow": "penstock.training.tracking.mlflow_tracker:MlflowTracker"},
    needs=("default_uri", "open", "repair"),
)
