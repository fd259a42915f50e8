"""Which values does the next trial take, and which trials end early? Optuna decides, from what is on record alone.

A sampler is made anew for each trial and seeded by its number, and a pruner gets all recorded reports again, so that a sweep
that was killed goes on as if it had not been.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from penstock.tasks.tune.record import Trial
from penstock.tasks.tune.spec import Dimension, TuneSpec

__all__ = ["Pruner", "propose"]

_TRIES = 100
"""Draws in a row that were tried before, after which a space counts as exhausted."""

_MEDIAN_OF = 3
"""Trials that must be done before `median` ends one."""


def propose(spec: TuneSpec, trials: Sequence[Trial]) -> dict[str, Any] | None:
    """Return values for the trial after `trials`, other than theirs; None at the limit or where the space has no others."""
    number, names = len(trials), list(spec.space)
    if number >= spec.limit:
        return None
    if spec.searcher == "grid":
        cells = itertools.product(*(dimension.extremes for dimension in spec.space.values()))
        return dict(zip(names, next(itertools.islice(cells, number, None)), strict=True))
    tried = [trial.values for trial in trials]
    for attempt in range(_TRIES):
        values = _ask(spec, trials, int(np.random.SeedSequence([spec.seed, number, attempt]).generate_state(1)[0]))
        if values not in tried:
            return values
    return None


class Pruner:
    """Decide which trials end early. One validation is one step of Optuna's pruners.

    Args:
        trials: those on record.
    """

    def __init__(self, spec: TuneSpec, trials: Sequence[Trial] = ()) -> None:
        study = _new_study(spec, pruner=_pruner(spec))
        self._study, self._trials = study, defaultdict[int, optuna.Trial](study.ask)
        for trial in trials:
            for validation, report in enumerate(trial.reports, start=1):
                self.report(trial.number, validation, report.value)
            self.end(trial)

    def report(self, number: int, validation: int, value: float) -> bool:
        """Take the value of a trial's next validation, counted from 1. Return whether the trial ends now."""
        trial = self._trials[number]
        trial.report(value, validation)
        return trial.should_prune()

    def end(self, trial: Trial) -> None:
        """Take the result of a trial, unless it is running."""
        if trial.state != "running":
            state = {"done": TrialState.COMPLETE, "stopped": TrialState.PRUNED, "failed": TrialState.FAIL}[trial.state]
            if state == TrialState.COMPLETE and not _is_number(trial):
                state = TrialState.FAIL
            self._study.tell(self._trials[trial.number], trial.value if state == TrialState.COMPLETE else None, state=state)


def _pruner(spec: TuneSpec) -> optuna.pruners.BasePruner:
    if spec.scheduler == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=_MEDIAN_OF, n_warmup_steps=spec.grace)
    if spec.scheduler == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(min_resource=spec.grace, reduction_factor=spec.reduction)
    return optuna.pruners.NopPruner()


def _is_number(trial: Trial) -> bool:
    return trial.value is not None and not math.isnan(trial.value)


def _new_study(spec: TuneSpec, **parts: Any) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(direction="minimize" if spec.mode == "min" else "maximize", **parts)


def _ask(spec: TuneSpec, trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """Ask a new sampler that knows the results so far. Listed values are their index there."""
    kinds = {key: _distribution(dimension) for key, dimension in spec.space.items()}
    listed = {key: dimension.choice for key, dimension in spec.space.items() if dimension.choice is not None}
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed)
    if spec.searcher == "tpe":
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(3, spec.limit // 3)))
    study = _new_study(spec, sampler=sampler)
    for trial in trials:
        if _is_number(trial):
            params = {key: listed[key].index(value) if key in listed else value for key, value in trial.values.items()}
            study.add_trial(create_trial(params=params, distributions=kinds, value=trial.value))
    asked = study.ask(kinds).params
    return {key: listed[key][asked[key]] if key in listed else asked[key] for key in spec.space}


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.choice is not None:
        return CategoricalDistribution(range(len(dimension.choice)))
    low, high = dimension.range or dimension.log_range or (0, 1)
    if dimension.is_whole:
        return IntDistribution(int(low), int(high), log=dimension.log_range is not None)
    return FloatDistribution(low, high, log=dimension.log_range is not None)
