"""Find a run by its id or a part of it, `last`, `previous`, `best`, or a version of its model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.errors import SpecError
from penstock.flows.history.metrics import better_sign, main_metric
from penstock.flows.verbs.status import state_of
from penstock.messages import counted, did_you_mean
from penstock.tasks.records.ledger import Ledger, Run

__all__ = ["RunNames"]

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
        storage, _, self.pipeline = state_of(self.file)
        self.ledger = Ledger(storage)
        self._known = list(self.ledger.runs())
        of_pipeline = (run for run in self._known if self.pipeline in (None, run.pipeline))
        self.runs = [run for run in of_pipeline if run.sweep in (None, run.run)]
        """Runs of this pipeline without trials of sweeps; the others are found by their whole id."""

    def find(self, name: str, has: Callable[[Run], bool] = lambda _run: True) -> Run:
        """Find the run called `name`.

        Args:
            has: whether a run has the records that are wanted; `last`, `previous` and `best` pass over those without them.

        Raises:
            SpecError: there is none, or there are several.
        """
        found = self._by_order(name, [run for run in self.runs if has(run)])
        if name in _BY_ORDER:
            if found is None:
                raise SpecError(
                    f"there is no run {name!r} with the records that this needs in {self.ledger.storage.root}, which has "
                    f"{counted(len(self.runs), 'run')}",
                    next_step="penstock log lists the runs; name one of them, or finish one with penstock run",
                )
            return found
        exact = [run for run in self._known if name in (run.run, run.run.removeprefix(f"{run.pipeline}-"))]
        several = exact or [run for run in self.runs if len(name) >= _PART and name in run.run]
        if len(several) > 1:
            raise SpecError(
                f"{name!r} is a part of {len(several)} runs",
                problems=[run.run for run in several[-10:]],
                next_step="name one of them by its whole id",
            )
        run = several[0] if several else self._of_version(name)
        if run is not None:
            return run
        if Path(name).exists():
            raise SpecError(f"{name!r} is not a run, but a file or folder", next_step=f"name the pipeline by --file {name}")
        known = [run.run for run in self.runs]
        raise SpecError(
            f"there is no run {name!r} in {self.ledger.storage.root}{did_you_mean(name, known)}",
            problems=known[-10:],
            next_step="use a run's id, last, previous, best, or a version of its model; penstock log lists the runs",
        )

    def _by_order(self, name: str, runs: Sequence[Run]) -> Run | None:
        if name in ("last", "previous"):
            return next(iter(runs[-1:] if name == "last" else runs[-2:-1]), None)
        measured = [run for run in runs if main_metric(run) is not None]
        if name != "best" or not measured:
            return None
        newest, metric = measured[-1], str(main_metric(measured[-1]))
        comparable = [run for run in measured if metric in run.result["metrics"]]
        return max(comparable, key=lambda run: (better_sign(newest, metric) or 1) * run.result["metrics"][metric])

    def _of_version(self, name: str) -> Run | None:
        """Find the run that made a version of the model: `models:/name/3`, `name/3`, `3` or `v3`."""
        model, _, version = name.removeprefix("models:/").rpartition("/")
        wanted = (model, version if model else version.removeprefix("v"))
        now = ((run, run.result.get("model_uri"), 0) for run in self.runs)
        before = ((run, each.model_uri, each.number) for run in self.runs for each in self.ledger.attempts(run.run))
        for run, uri, attempt in itertools.chain(now, before):
            of_run, _, made = str(uri).removeprefix("models:/").rpartition("/")
            if wanted == (of_run if model else "", made):
                if not attempt:
                    return run
                later = run.result.get("model_uri") or "a later attempt"
                raise SpecError(
                    f"{uri} is of attempt {attempt} of run {run.run}, whose results are now those of {later}",
                    next_step=f"penstock log has the results of each attempt; {run.run} names the run with those of now",
                )
        return None
