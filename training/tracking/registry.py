"""Which names may `tracking.tracker` take?"""

from __future__ import annotations

from penstock.plugins import Plugins
from penstock.training.tracking.tracker import Tracker

__all__ = ["TRACKERS"]

TRACKERS: Plugins[type[Tracker]] = Plugins(
    "tracker", "penstock.trackers", {"mlflow": "penstock.training.tracking.mlflow_tracker:MlflowTracker"}
)
