"""How does a generation of trials follow from the one before it? Population based training, as whole trainings.

The members of a generation train side by side to their end. A member of the next one begins with the weights of its
predecessor, by `train.start_from`; where that is among the worst quarter, with the weights of one of the best quarter, and with
its values changed a little. So every trial is described by a pipeline file, whatever came before it, and what follows from a
generation depends on its results and on no order in which they came.

Source: Jaderberg et al. 2017, Population Based Training of Neural Networks: truncation selection, perturbation and resampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.tasks.tune.record import Trial
from penstock.tasks.tune.spec import Dimension, TuneSpec

__all__ = ["START", "generation_before", "next_member"]

START = "train.start_from"

_REDRAWN = 0.25
"""How often a value is drawn anew instead of changed a little."""

_FACTORS = (0.8, 1.25)


def generation_before(spec: TuneSpec, trials: Sequence[Trial]) -> Sequence[Trial]:
    """The generation that the trial after `trials` follows from; empty for the first, and without `pbt`."""
    if spec.scheduler != "pbt":
        return ()
    end = len(trials) // spec.population * spec.population
    return trials[max(0, end - spec.population) : end]


def next_member(
    spec: TuneSpec, trials: Sequence[Trial], draw: Callable[[Dimension, np.random.Generator], Any]
) -> dict[str, Any] | None:
    """Values of the trial after `trials`, whose generation before has ended; None where none of that came to its end.

    Args:
        draw: a value of a dimension.
    """
    before = generation_before(spec, trials)
    sign = {"min": 1, "max": -1}[spec.mode]
    done = [(sign * trial.value, trial.number, trial) for trial in before if trial.state == "done" and trial.value is not None]
    if not done:
        return None
    ranked = [trial for _, _, trial in sorted(done)]
    quarter = max(1, spec.population // 4)
    worst = {trial.number for trial in before} - {trial.number for trial in ranked[: spec.population - quarter]}
    predecessor = before[len(trials) % spec.population]
    if predecessor.number not in worst:
        return {**_own(spec, predecessor), START: f"run:{predecessor.run}"}
    generator = np.random.default_rng([spec.seed, len(trials)])
    best = ranked[int(generator.integers(min(quarter, len(ranked))))]
    changed = {key: _changed(spec.space[key], value, generator, draw) for key, value in _own(spec, best).items()}
    return {**changed, START: f"run:{best.run}"}


def _own(spec: TuneSpec, trial: Trial) -> dict[str, Any]:
    return {key: trial.values[key] for key in spec.space}


def _changed(
    dimension: Dimension,
    value: Any,
    generator: np.random.Generator,
    draw: Callable[[Dimension, np.random.Generator], Any],
) -> Any:
    redrawn, up = generator.random() < _REDRAWN, bool(generator.integers(2))
    if redrawn:
        return draw(dimension, generator)
    # At an end of what there is, the other way.
    if dimension.options is not None:
        at = dimension.options.index(value)
        beside = [place for place in ((at + 1, at - 1) if up else (at - 1, at + 1)) if 0 <= place < len(dimension.options)]
        return dimension.options[beside[0]] if beside else value
    low, high = dimension.range or dimension.log_range or (0, 1)
    moved = [_times(value, factor, whole=dimension.is_whole) for factor in (_FACTORS[up], _FACTORS[not up])]
    return next((each for each in moved if low <= each <= high), value)


def _times(value: float, factor: float, *, whole: bool) -> float:
    if whole:
        return math.ceil(value * factor) if factor > 1 else math.floor(value * factor)
    return float(f"{value * factor:.6g}")
