"""Which object is each stage? In the order of tasks/stages.py, which holds the names."""

from __future__ import annotations

from penstock.tasks import evaluate, materialize, preprocess, read, register, shuffle, train
from penstock.tasks.stage import Stage
from penstock.tasks.stages import STAGES

__all__ = ["ALL_STAGES"]

_BY_NAME = {module.STAGE.name: module.STAGE for module in (read, preprocess, materialize, shuffle, train, evaluate, register)}

ALL_STAGES: tuple[Stage, ...] = tuple(_BY_NAME[name] for name in STAGES)
