"""Which spec has a trial, and would the user's code take it?"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from penstock.errors import PreflightError, SpecError
from penstock.flows.preflight.checks import check_recipe
from penstock.flows.spec_file import LoadedSpec, as_override, load_spec
from penstock.messages import counted
from penstock.tasks.tune.spec import TuneSpec

__all__ = ["check_space", "describe_space", "load_trial", "tune_spec"]


def tune_spec(loaded: LoadedSpec) -> TuneSpec:
    """Return the section `tune` of the file. Raises SpecError if it has none."""
    if loaded.spec.tune is None:
        raise SpecError(
            f"{loaded.file.name} has no section `tune` with the values to try",
            next_step="add for instance: tune: {space: {train.learning_rate: {log_range: [0.0001, 0.1]}}, trials: 8}",
        )
    section: TuneSpec = loaded.spec.tune
    return section


def load_trial(loaded: LoadedSpec, values: Mapping[str, Any]) -> LoadedSpec:
    """Return the pipeline's spec with the values of a trial."""
    return load_spec(loaded.file, [*loaded.overrides, *(as_override(key, value) for key, value in values.items())])


def describe_space(loaded: LoadedSpec) -> str:
    """Check the space as `check_space` does, and describe it for `penstock check`; empty if the file has no section `tune`."""
    if loaded.spec.tune is None:
        return ""
    check_space(loaded)
    section = tune_spec(loaded)
    return f"up to {counted(section.limit, 'trial')} over {', '.join(section.space)}"


def check_space(loaded: LoadedSpec) -> None:
    """Check every listed value of each key, or both ends of its range, and let the recipe take the first of them.

    Whether `train.params.hiden` exists, the recipe's constructor alone knows.

    Raises:
        SpecError: values that the file or the recipe does not take; one of each key is named.
        PreflightError: Optuna is not installed.
    """
    section, problems = tune_spec(loaded), list[str]()
    if importlib.util.find_spec("optuna") is None:
        raise PreflightError("a sweep needs Optuna, which is not installed", next_step="pip install 'penstock[tune]'")
    for key, dimension in section.space.items():
        try:
            trials = [load_trial(loaded, {key: value}) for value in dimension.extremes]
            check_recipe(trials[0].project)
        except SpecError as error:
            found = [problem.removeprefix(f"--set {key}: ") for problem in error.problems]
            problems.append(f"tune.space.{key}: {'; '.join(found) or error.message}")
    if problems:
        raise SpecError(
            f"{loaded.file.name}: {counted(len(problems), 'value')} of the section tune cannot be used",
            problems=problems,
            next_step=f"correct the --set options or edit {loaded.file.name}, then: penstock check {loaded.file}",
        )
