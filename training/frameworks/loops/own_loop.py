"""How does the loop of a library become a framework? Imports no Ray: loaders of models import it, too."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import PreflightError, SpecError
from penstock.messages import describe_error
from penstock.training.frameworks.on_workers import OnWorkers
from penstock.training.job import TrainJob
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

if TYPE_CHECKING:
    from penstock.training.on_ray.worker import RankResult
    from penstock.training.ranks import Group

__all__ = ["OwnLoop", "build_user_model", "installed", "refuse_unread", "require_installed"]


class OwnLoop(OnWorkers):
    """Trains by a function `fit(job, group, session)`, in Ray Train.

    Attributes:
        fit: `module:function`. The module is imported on the workers alone, since the library takes seconds to load.
        model_files: as of `Framework`; the first has the weights.
    """

    fit: str
    model_files: tuple[str, ...]
    in_ray_train = True

    @property
    def run_rank(self) -> Callable[..., RankResult]:
        """Runs `fit` in a session."""
        return partial(_run_own_loop, self.fit, self.model_files)


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


def installed(*distributions: str) -> tuple[str, ...]:
    """The installed ones of these distributions."""
    there = []
    for name in distributions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        there.append(name)
    return tuple(there)


def require_installed(framework: str, *distributions: str) -> tuple[str, ...]:
    """Return the distributions.

    Raises:
        PreflightError: one is not installed.
    """
    there = installed(*distributions)
    absent = [name for name in distributions if name not in there]
    if absent:
        raise PreflightError(
            f"train.framework: {framework} needs {' and '.join(absent)}, which "
            f"{'is' if len(absent) == 1 else 'are'} not installed",
            next_step=f'pip install "penstock[{framework}]"',
        )
    return there


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


def build_user_model(code: UserCode, build: Callable[[], Any], params: Iterable[str] = ()) -> Any:
    """Call `build`, which calls the user's code with `train.params`.

    Args:
        params: names of the params that the code is called with.

    Raises:
        SpecError: the code fails, or does not take these params.
    """
    try:
        return build()
    except SpecError:
        raise
    except TypeError as error:
        raise SpecError(
            f"train.params do not fit {code.target}: {error}", next_step="compare train.params with its arguments"
        ) from error
    except (Exception, SystemExit) as error:  # the user's code
        raise SpecError(f"train.recipe: {code.target}(**train.params) failed: {describe_error(error)}") from error
