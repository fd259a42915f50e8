"""What is the same for frameworks that build what user code says: Lightning, transformers, Keras, those of one process?"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.errors import PreflightError, SpecError
from penstock.messages import misnamed, said_of
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["blaming_the_build", "installed", "must_have", "refuse_unread"]


def installed(*distributions: str) -> tuple[str, ...]:
    """Those that are installed here."""
    there = []
    for name in distributions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        there.append(name)
    return tuple(there)


def must_have(framework: str, *distributions: str) -> tuple[str, ...]:
    """All of them, where they are installed.

    Raises:
        PreflightError: one is not.
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
        instead: field that is not read -> what does it instead.

    Raises:
        SpecError: names all that the user has set.
    """
    problems = [f"train.{name} is not read; {instead[name]}" for name in spec.set_by_user(instead)]
    if problems:
        raise SpecError(
            f"train does not fit {spec.framework}",
            problems=problems,
            next_step=f"correct the train section; see docs/{spec.framework}.md",
        )


def blaming_the_build(code: UserCode, build: Callable[[], Any], params: Iterable[str] = ()) -> Any:
    """What the user's code builds from `train.params`.

    Args:
        params: the names of those that the code itself is called with.

    Raises:
        SpecError: it fails, or does not take these params.
    """
    try:
        return build()
    except SpecError:
        raise
    except TypeError as error:
        meant = misnamed(code.load(), params) if params else ""
        raise SpecError(
            f"train.params do not fit {code.target}: {error}{meant}", next_step="compare train.params with its arguments"
        ) from error
    except (Exception, SystemExit) as error:  # the user's code
        raise SpecError(f"train.recipe: {code.target}(**train.params) failed: {said_of(error)}") from error
