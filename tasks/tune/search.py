"""Which values does the next trial take? A pure function of the spec, the trial's number and the trials so far.

Nothing is remembered between two calls, so a sweep that was killed proposes the same again.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import PreflightError
from penstock.tasks.tune.population import generation_before, next_member
from penstock.tasks.tune.record import Trial
from penstock.tasks.tune.spec import Dimension, TuneSpec

__all__ = ["check_searcher", "propose"]

_TRIES = 100
"""Draws in a row that were tried before, after which a space counts as exhausted."""


def check_searcher(spec: TuneSpec, origin: str) -> None:
    """Raise PreflightError if the searcher's package is not installed.

    Args:
        origin: where the searcher is named.
    """
    if spec.searcher == "optuna":
        try:
            importlib.import_module("optuna")
        except ImportError as error:
            raise PreflightError(
                f"{origin}: tune.searcher: optuna cannot be used: {error}",
                next_step="pip install 'penstock[optuna]', or use searcher: random",
            ) from error


def propose(spec: TuneSpec, trials: Sequence[Trial]) -> dict[str, Any] | None:
    """Values for the trial after `trials`, other than theirs; None where the space has no others or the limit is reached.

    With `scheduler: pbt` the generation before that trial has ended.
    """
    if len(trials) >= spec.limit:
        return None
    if generation_before(spec, trials):
        return next_member(spec, trials, _draw)
    tried = [trial.values for trial in trials]
    if spec.searcher == "grid":
        return _cell(spec.space, len(trials))
    for attempt in range(_TRIES):
        seed = [spec.seed, len(trials), attempt]
        values = _from_optuna(spec, trials, seed) if spec.searcher == "optuna" else _drawn(spec.space, seed)
        if values not in tried:
            return values
    return None


def _cell(space: Mapping[str, Dimension], number: int) -> dict[str, Any]:
    """The combination of that number; the last key changes fastest."""
    values: dict[str, Any] = {}
    for key, dimension in reversed(list(space.items())):
        options = dimension.options or []
        number, index = divmod(number, len(options))
        values[key] = options[index]
    return {key: values[key] for key in space}


def _drawn(space: Mapping[str, Dimension], seed: list[int]) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {key: _draw(dimension, generator) for key, dimension in space.items()}


def _draw(dimension: Dimension, generator: np.random.Generator) -> Any:
    if dimension.options is not None:
        return dimension.options[int(generator.integers(len(dimension.options)))]
    if dimension.log_range is not None:
        low, high = dimension.log_range
        # A whole number stands for the interval up to the next one, or the last would never be drawn.
        value = math.exp(generator.uniform(math.log(low), math.log(high + dimension.is_whole)))
        return min(int(value), int(high)) if dimension.is_whole else _short(value, low, high)
    low, high = dimension.range or (0, 1)
    if dimension.is_whole:
        return int(generator.integers(int(low), int(high), endpoint=True))
    return _short(generator.uniform(low, high), low, high)


def _short(value: float, low: float, high: float) -> float:
    """Six digits: enough to tell trials apart, and short in a table."""
    return min(max(float(f"{value:.6g}"), low), high)


def _from_optuna(spec: TuneSpec, trials: Sequence[Trial], seed: list[int]) -> dict[str, Any]:
    optuna = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds = {key: _distribution(optuna.distributions, dimension) for key, dimension in spec.space.items()}
    number = int(np.random.SeedSequence(seed).generate_state(1)[0])
    sampler = optuna.samplers.TPESampler(seed=number, n_startup_trials=min(10, max(3, spec.limit // 3)))
    study = optuna.create_study(direction={"min": "minimize", "max": "maximize"}[spec.mode], sampler=sampler)
    for trial in trials:
        if trial.value is not None:
            params = {key: _in_optuna(spec.space[key], value) for key, value in trial.values.items()}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=trial.value))
    asked = study.ask(kinds).params
    return {key: _from_index(dimension, asked[key]) for key, dimension in spec.space.items()}


def _distribution(distributions: Any, dimension: Dimension) -> Any:
    if dimension.options is not None:
        return distributions.CategoricalDistribution(range(len(dimension.options)))
    low, high = dimension.range or dimension.log_range or (0, 1)
    kind = distributions.IntDistribution if dimension.is_whole else distributions.FloatDistribution
    return kind(low, high, log=dimension.log_range is not None)


def _in_optuna(dimension: Dimension, value: Any) -> Any:
    return value if dimension.options is None else dimension.options.index(value)


def _from_index(dimension: Dimension, asked: Any) -> Any:
    if dimension.options is not None:
        return dimension.options[asked]
    low, high = dimension.range or dimension.log_range or (0, 1)
    return asked if dimension.is_whole else _short(asked, low, high)
