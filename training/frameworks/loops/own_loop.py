"""How does the loop of a library become a framework? Imports no Ray: loaders of models import it, too."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import PreflightError, SpecError
from penstock.training.frameworks.on_workers import OnWorkers, installed
from penstock.training.job import TrainJob
from penstock.training.model import Predicts, UsualPredicts
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

if TYPE_CHECKING:
    from penstock.training.on_ray.worker import RankResult
    from penstock.training.ranks import Group

__all__ = ["UNREAD", "LearnsBatches", "OwnLoop", "refuse_unread"]

UNREAD = {
    **dict.fromkeys(
        ("learning_rate", "clip_norm", "accumulate", "precision", "compile"), "set it in the model, from train.params"
    ),
    "callbacks": "this loop calls no callbacks",
    "last_batch": "the last batch of an epoch is kept",
    "start_from": "load weights where the model is made",
}
"""Field that `learn_batches` (loops/steps.py) does not read -> the way to do it here."""


class OwnLoop(OnWorkers):
    """Trains by a function `fit(job, group, session)`, in Ray Train.

    Attributes:
        extra: of penstock, that installs what it needs; empty for none.
        needs: what has to be installed, by distribution; of a tuple one at least.
        fit: `module:function`. The module is imported on the workers alone, since the library takes seconds to load.
        model_files: as of `Framework`; the first has the weights.
    """

    extra = ""
    needs: tuple[str | tuple[str, ...], ...] = ()
    fit: str
    model_files: tuple[str, ...]
    in_ray_train = True

    @property
    def libraries(self) -> tuple[str, ...]:
        """The installed ones of `needs`.

        Raises:
            PreflightError: none is installed of what the framework needs.
        """
        found: list[str] = []
        for need in self.needs:
            names = need if isinstance(need, tuple) else (need,)
            there = installed(*names)
            if not there:
                raise PreflightError(
                    f"{self.extra or type(self).__name__} needs {' or '.join(names)}, which is not installed",
                    next_step=f'pip install "penstock[{self.extra}]"' if self.extra else f"pip install {names[0]}",
                )
            found += there
        return tuple(found)

    @property
    def run_rank(self) -> Callable[..., RankResult]:
        """Runs `fit` in a session."""
        return partial(_run_own_loop, self.fit, self.model_files)


class LearnsBatches(OwnLoop):
    """Trains a model in one worker, batch by batch: `learn_batches` of loops/steps.py.

    Attributes:
        loader: as of `Framework`; `files` is None to begin. The model is a `TrainedModel` that has `learn` and `write`, too,
            as `learn_batches` calls them.
    """

    loader: str
    fit = "penstock.training.frameworks.loops.steps:fit_loaded"

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Import the code of `train.recipe`. A model that `predicts` otherwise, or cannot predict, returns its own.

        Raises:
            SpecError: a setting is not read, or there is more than one worker.
        """
        refuse_unread(spec, UNREAD)
        _ = self.libraries
        if spec.workers > 1:
            raise SpecError(
                f"train.workers: {spec.workers} with train.framework: {spec.framework}, which trains in one process",
                next_step="set train.workers: 1",
            )
        code.load()
        return UsualPredicts()


def _run_own_loop(fit: str, model_files: Sequence[str], job: TrainJob, group: Group, client: Any, **options: Any) -> RankResult:
    from penstock.training.session.attempt import run_session

    module, _, name = fit.partition(":")
    function = getattr(importlib.import_module(module), name)
    return run_session(
        job,
        group,
        client,
        partial(function, job, group),
        digest=lambda digests: digests[model_files[0]],
        separate=model_files,
        restores_all=True,
        **options,
    )


def refuse_unread(spec: TrainSpec, instead: Mapping[str, str]) -> None:
    """Refuse settings that only penstock's own loop reads.

    Args:
        instead: field that is not read -> the way to do it here.

    Raises:
        SpecError: the user has set some of them; it names all.
    """
    problems = [f"train.{name} is not read; {instead[name]}" for name in spec.set_by_user(instead)]
    if problems:
        raise SpecError(
            f"train does not fit {spec.framework}",
            problems=problems,
            next_step=f"correct the train section; see docs/{spec.framework}.md",
        )
