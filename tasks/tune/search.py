"""Which values does the next trial take, and which trials end early? Optuna decides, from what is on record alone.

A sampler is made anew for each trial and seeded by its number, and a pruner gets all recorded reports again, so that a sweep
that was killed goes on as if it had not been.
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

__all__ = ["Pruner", "check_library", "propose"]

_TRIES = 100
"""Draws in a row that were tried before, after which a space counts as exhausted."""

_MEDIAN_OF = 3
"""Trials that must be done before `median` ends one."""


def check_library(spec: TuneSpec, origins: Mapping[str, str]) -> None:
    """Raise PreflightError if the sweep needs Optuna, which is not installed. A whole grid needs no library.

    Args:
        origins: key -> where the file or an option sets it.
    """
    key = "searcher" if spec.searcher != "grid" else "scheduler"
    value = getattr(spec, key)
    if value == "none":
        return
    try:
        importlib.import_module("optuna")
    except ImportError as error:
        origin = origins.get(f"tune.{key}", "")
        where = f"{origin}={value}" if origin.startswith("--set") else origin
        raise PreflightError(
            f"{where}: tune.{key}: {value} needs Optuna: {error}", next_step="pip install 'penstock[tune]'"
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


class Pruner:
    """Decide which trials end early. One validation is one step of Optuna's pruners.

    Args:
        trials: those on record.
    """

    def __init__(self, spec: TuneSpec, trials: Sequence[Trial] = ()) -> None:
        self._study = _new_study(spec, pruner=_pruner(spec)) if spec.scheduler != "none" else None
        self._trials: dict[int, tuple[optuna.Trial, itertools.count[int]]] = {}
        for trial in trials:
            for report in trial.reports:
                self.report(trial.number, report.value)
            self.end(trial)

    def report(self, number: int, value: float) -> bool:
        """Take the value of the trial's next validation. Return whether the trial ends now."""
        if self._study is None:
            return False
        trial, steps = self._of(number)
        trial.report(value, next(steps))
        return trial.should_prune()

    def end(self, trial: Trial) -> None:
        """Take the result of a trial, unless it is running."""
        if self._study is not None and trial.state != "running":
            from optuna.trial import TrialState

            state = {"done": TrialState.COMPLETE, "stopped": TrialState.PRUNED, "failed": TrialState.FAIL}[trial.state]
            value = trial.value if state == TrialState.COMPLETE else None
            self._study.tell(self._of(trial.number)[0], value, state=state)

    def _of(self, number: int) -> tuple[optuna.Trial, itertools.count[int]]:
        assert self._study is not None
        if number not in self._trials:
            self._trials[number] = self._study.ask(), itertools.count(1)
        return self._trials[number]


def _pruner(spec: TuneSpec) -> optuna.pruners.BasePruner:
    import optuna

    if spec.scheduler == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=_MEDIAN_OF, n_warmup_steps=spec.grace)
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=spec.grace, reduction_factor=spec.reduction)


def _new_study(spec: TuneSpec, **parts: Any) -> optuna.Study:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(direction="minimize" if spec.mode == "min" else "maximize", **parts)


def _ask(spec: TuneSpec, trials: Sequence[Trial], seed: int) -> dict[str, Any]:
    """Ask a new sampler that knows the results so far. Listed values are their index there."""
    import optuna

    kinds = {key: _distribution(dimension) for key, dimension in spec.space.items()}
    listed = {key: dimension.options for key, dimension in spec.space.items() if dimension.options is not None}
    sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed)
    if spec.searcher == "tpe":
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(3, spec.limit // 3)))
    study = _new_study(spec, sampler=sampler)
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
