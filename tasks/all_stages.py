"""Which object is each stage? In the order of tasks/stages.py, which holds the names."""

from __future__ import annotations

from penstock.tasks import evaluate, register, shuffle, train
from penstock.tasks.prepare import MATERIALIZE, PREPROCESS, READ
from penstock.tasks.stage import Stage
from penstock.tasks.stages import STAGES

__all__ = ["ALL_STAGES"]

_OTHERS = (module.STAGE for module in (shuffle, train, evaluate, register))

_BY_NAME = {stage.name: stage for stage in (READ, PREPROCESS, MATERIALIZE, *_OTHERS)}

ALL_STAGES: tuple[Stage, ...] = tuple(_BY_NAME[name] for name in STAGES)
