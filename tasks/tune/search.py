"""Which values does the next trial take? Optuna decides, from the trials on record alone.

A sampler is made anew for each trial and seeded by its number, so that a sweep that was killed goes on as if it had not been.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import PreflightError
from penstock.tasks.tune.record import Trial
from penstock.tasks.tune.spec import Dimension, TuneSpec

if TYPE_CHECKING:
    import optuna

__all__ = ["check_library", "propose"]

_TRIES = 100
"""Draws in a row that were tried before, after which a space counts as exhausted."""


def check_library(spec: TuneSpec, origins: Mapping[str, str]) -> None:
    """Raise PreflightError if the sweep needs Optuna, which is not installed. A whole grid needs no library.

    Args:
        origins: key -> where the file or an option sets it.
    """
    if spec.searcher == "grid":
        return
    try:
        importlib.import_module("optuna")
    except ImportError as error:
        origin = origins.get("tune.searcher", "")
        where = f"{origin}={spec.searcher}" if origin.startswith("--set") else origin
        raise PreflightError(
            f"{where}: tune.searcher: {spec.searcher} needs Optuna: {error}", next_step="pip install 'penstock[tune]'"
        ) from error


def propose(spec: TuneSpec, trials: Sequence[Trial]) -> dict[str, Any] | None:
    """Return values for the trial after `trials`, other than theirs; None at the limit or where the space has no others."""
    number, names = len(trials), list(spec.space)
    if number >= spec.limit:
        return None
    if spec.searcher == "grid":
        cells = itertools.product(*(dimension.options or () for dimension in spec.space.values()))
        return dict(zip(names, next(itertools.islice(cells, number, None)), strict=True))
    tried = [trial.values for trial in trials]
    for attempt in range(_TRIES):
        values = _ask(spec, trials, int(np.random.SeedSequence([spec.seed, number, attempt]).generate_state(1)[0]))
        if values not in tried:
            return values
    return None


def _ask(spec: TuneSpec, trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """Ask a new sampler that knows the results so far. Listed values are their index there."""
    import optuna

    kinds = {key: _distribution(dimension) for key, dimension in spec.space.items()}
    listed = {key: dimension.options for key, dimension in spec.space.items() if dimension.options is not None}
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed)
    if spec.searcher == "tpe":
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(3, spec.limit // 3)))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize" if spec.mode == "min" else "maximize", sampler=sampler)
    for trial in trials:
        if trial.value is not None and not math.isnan(trial.value):
            params = {key: listed[key].index(value) if key in listed else value for key, value in trial.values.items()}
            study.add_trial(optuna.trial.create_trial(params=params, distributions=kinds, value=trial.value))
    asked = study.ask(kinds).params
    return {key: listed[key][asked[key]] if key in listed else asked[key] for key in spec.space}


def _distribution(dimension: Dimension) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.options is not None:
        return CategoricalDistribution(range(len(dimension.options)))
    low, high = dimension.range or dimension.log_range or (0, 1)
    if dimension.is_whole:
        return IntDistribution(int(low), int(high), log=dimension.log_range is not None)
    return FloatDistribution(low, high, log=dimension.log_range is not None)
