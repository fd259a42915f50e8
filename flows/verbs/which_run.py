"""Find a run by its id or a part of it, `last`, `best`, a version of its model, or an alias."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError, SpecError
from penstock.flows.verbs.status import state_of
from penstock.messages import counted, did_you_mean
from penstock.tasks.records.ledger import Ledger, Run
from penstock.training.better import LOWER_IS_BETTER
from penstock.training.registry.registry import REGISTRIES
from penstock.training.spec import BestSpec, TrackingSpec

__all__ = ["RunNames", "better_sign", "main_metric"]


_BY_ORDER = ("last", "previous", "best")

_PART = 4
"""Characters that a part of an id needs: fewer are a version of the model."""


class RunNames:
    """Finds runs of one storage by name.

    Args:
        file: the pipeline file or its folder; None for the pipeline of the current folder, or for all runs in its .penstock
            if it has no pipeline.yaml.
    """

    def __init__(self, file: Path | None) -> None:
        here = Path("pipeline.yaml")
        self.file = here if file is None and here.is_file() else file
        storage, self.state_dir, self.pipeline = state_of(self.file)
        self.ledger = Ledger(storage)
        self._known = list(self.ledger.runs())
        of_pipeline = (run for run in self._known if self.pipeline in (None, run.pipeline))
        self.runs = [run for run in of_pipeline if run.sweep in (None, run.run)]
        """Runs of this pipeline without trials of sweeps; the others are found by their whole id."""

    def find(self, name: str) -> Run:
        """Find the run called `name`.

        Raises:
            SpecError: there is none, or there are several.
        """
        finished = [run for run in self.runs if run.result]
        if name == "last" and self.runs:
            return self.runs[-1]
        if name == "previous" and len(self.runs) > 1:
            return self.runs[-2]
        if name == "best" and finished:
            return self._best(finished)
        if name in _BY_ORDER:
            raise SpecError(
                f"there is no run {name!r} in {self.ledger.storage.root}, which has {counted(len(self.runs), 'run')}"
                + (f", {len(finished):,} of them finished" if self.runs else ""),
                next_step=f"penstock run {shlex.quote(str(self.file or 'pipeline.yaml'))}"
                + (" --fresh makes another" if self.runs and name != "best" else ""),
            )
        exact = [run for run in self._known if name in (run.run, run.run.removeprefix(f"{run.pipeline}-"))]
        found = exact or [run for run in self.runs if len(name) >= _PART and name in run.run]
        if len(found) > 1:
            raise SpecError(
                f"{name!r} is a part of {len(found)} runs",
                problems=[run.run for run in found[-10:]],
                next_step="name one of them by its whole id",
            )
        run = found[0] if found else self._of_version(name)
        if run is not None:
            return run
        known = [run.run for run in self.runs]
        raise SpecError(
            f"there is no run {name!r} in {self.ledger.storage.root}{did_you_mean(name, known)}",
            problems=known[-10:],
            next_step="use a run's id, last, previous, best, a model's version or its alias; penstock log lists the runs",
        )

    def _best(self, finished: Sequence[Run]) -> Run:
        newest = finished[-1]
        metric = main_metric(newest)
        if metric is None:
            raise SpecError("no run has a metric to be best by", next_step="name a run: penstock log lists them")
        measured = [run for run in finished if metric in run.result.get("metrics", {})]
        return max(measured, key=lambda run: better_sign(newest, metric) * run.result["metrics"][metric])

    def _of_version(self, name: str) -> Run | None:
        """Find the run that made a version of the model: `models:/name/3`, `3`, or an alias."""
        model, number, alias = _parse_model(name)
        uris = {str(run.result["model_uri"]): run for run in self.runs if run.result.get("model_uri")}
        if number is not None:
            return next((run for uri, run in uris.items() if _version_of(uri) == (model or _version_of(uri)[0], number)), None)
        for run in reversed(self.runs):
            version = self._alias_version(run, model, alias)
            if version is not None:
                return next((made for uri, made in uris.items() if _version_of(uri)[1] == version), None)
        return None

    def _alias_version(self, run: Run, model: str | None, alias: str) -> str | None:
        name = model or (run.spec.get("register") or {}).get("name") or run.pipeline
        try:
            registry: Any = REGISTRIES.get(run.spec.get("tracking", {}).get("registry", TrackingSpec().registry))
            version: str | None = registry.aliased(registry.default_uri(self.state_dir), name, alias)
        except (PenstockError, AttributeError):  # a registry of another package may have no aliases
            return None
        return version


def main_metric(run: Run) -> str | None:
    """Return the metric of the best checkpoint, else the first held-out metric of the result."""
    metrics = run.result.get("metrics", {})
    chosen = ((run.spec.get("train", {}).get("checkpoint") or {}).get("best") or {}).get("metric")
    wanted = [chosen, *(f"{split}/{name}" for split in ("test", "val") for name in ("accuracy", "r2", "loss"))]
    return next((name for name in wanted if name in metrics), next(iter(sorted(metrics)), None))


def better_sign(run: Run, metric: str) -> int:
    """Return 1 if more is better, -1 if less is."""
    best = (run.spec.get("train", {}).get("checkpoint") or {}).get("best") or {}
    if best.get("metric") == metric:
        return 1 if BestSpec.model_validate(best).mode == "max" else -1
    return -1 if metric.rpartition("/")[2] in LOWER_IS_BETTER else 1


def _parse_model(name: str) -> tuple[str | None, str | None, str]:
    """Return (model, version, alias) of `models:/name/3`, `models:/name@alias`, `name@alias`, `3`, `v3` or `alias`."""
    rest = name.removeprefix("models:/")
    model, at, alias = rest.partition("@")
    if at:
        return model, None, alias
    model, slash, version = rest.rpartition("/")
    text = version.removeprefix("v")
    if text.isdigit():
        return (model or None) if slash else None, text, ""
    return None, None, rest


def _version_of(uri: str) -> tuple[str, str]:
    model, _, version = uri.removeprefix("models:/").rpartition("/")
    return model, version
