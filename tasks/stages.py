"""Which stages does a pipeline have, in which order, and what does each one build on?

Names only: the command line needs them without loading Prefect. tasks/all_stages.py holds the stages themselves.
"""

from __future__ import annotations

from typing import Literal, get_args

__all__ = ["BEFORE_TRAINING", "STAGES", "UPSTREAM", "StageName"]

StageName = Literal["read", "preprocess", "materialize", "shuffle", "train", "evaluate", "register"]

STAGES: tuple[StageName, ...] = get_args(StageName)
"""In the order they run."""

BEFORE_TRAINING = STAGES[: STAGES.index("train")]
"""What decides which rows are trained on, and in which order."""

UPSTREAM: dict[StageName, tuple[StageName, ...]] = {
    "read": (),
    "preprocess": ("read",),
    "materialize": ("preprocess",),
    "shuffle": ("materialize",),
    "train": (),
    "evaluate": ("train",),
    "register": ("train",),
}
"""Stage -> the stages whose keys are part of its own. Those after `shuffle` depend on the rows themselves: see keys.py."""
