"""Which ways can penstock fail, and what does each mean to a script that called it?

    PenstockError                      1
      SpecError                        2   the YAML file is wrong; every problem is listed
      PreflightError                   3   resources or services refuse before anything is spent
        ServiceError                   3   a configured Prefect, Ray, MLflow or storage endpoint does not answer
      DataError                        4   the rows are wrong
      TrainingError                    5   training failed after its retries
        CheckpointError                5   a checkpoint cannot be written or none can be read
      ResumeError                      6   going on would break a promise
        LeaseHeldError                 6   another process works on this run
      Interrupted                    130/143   SIGINT or SIGTERM, after saving

Every class survives a trip through pickle, because Ray carries errors between processes.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any, Self

from penstock.redact import redact_text

__all__ = [
    "CheckpointError",
    "DataError",
    "Interrupted",
    "LeaseHeldError",
    "PenstockError",
    "PreflightError",
    "ResumeError",
    "ServiceError",
    "ShardError",
    "SpecError",
    "TrainingError",
]


class PenstockError(Exception):
    """An error a user can act on. Its texts hold no secrets: those that `redact_text` finds are hidden.

    Args:
        message: the thing, its value and the rule it broke, in one or two sentences.
        problems: further findings, one line each, reported together.
        next_step: the command or the edit that leads on. See `with_next_step`.

    Attributes:
        result: what an attempt reached before this error ended it; see flows/run/close_attempt.py.
        parts: the errors that it combines; empty for a single one.
        transient: the fault may be gone at another try, so that the workers of a training are started again for it.
        retried: `train.retries` restarts met it, so that the stage is not run again for it.
    """

    exit_code = 1
    usual_next_step = ""
    """The next step of an error that has none of its own and ends a command."""
    transient = False
    retried = False

    def __init__(self, message: str, *, problems: Sequence[str] = (), next_step: str = "") -> None:
        self.message = redact_text(message)
        super().__init__(self.message)
        self.problems = tuple(map(redact_text, problems))
        self.next_step = redact_text(next_step)
        self.result: dict[str, Any] = {}
        self.parts: tuple[PenstockError, ...] = ()

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows in place of a traceback through penstock."""
        return [f"{type(self).__name__}: {self}"]

    def with_next_step(self, run: str = "") -> Self:
        """Add the usual next step if the error has none, and return the error, which ends a command.

        Args:
            run: the command of the pipeline that it is about, in place of `penstock run FILE`, if that is known.
        """
        self.next_step = (self.next_step or self.usual_next_step).replace("penstock run FILE", run or "penstock run FILE")
        return self

    def __str__(self) -> str:
        lines = [self.message, *(f"  - {problem}" for problem in self.problems)]
        if self.next_step:
            lines.append(f"Next: {self.next_step}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.__dict__.copy())


def _rebuild(kind: type[PenstockError], state: dict[str, object]) -> PenstockError:
    error = kind.__new__(kind)
    Exception.__init__(error, state["message"])
    error.__dict__.update(state)
    return error


class SpecError(PenstockError):
    """The pipeline file is wrong; `problems` holds one line per problem."""

    exit_code = 2
    usual_next_step = "correct it, and run the same command again"


class PreflightError(PenstockError):
    """Something needed is missing, and nothing has been spent yet."""

    exit_code = 3


class ServiceError(PreflightError):
    """A configured server or store does not answer, or refuses the credentials."""


class DataError(PenstockError):
    """The source rows break a rule; the message names the first file and row."""

    exit_code = 4
    usual_next_step = "correct the rows, or their section `data` in the pipeline file, and run the same command again"


class ShardError(DataError):
    """Prepared rows are gone, torn or not those that were committed. The materialize stage prepares them again."""

    def __init__(
        self,
        message: str,
        *,
        problems: Sequence[str] = (),
        next_step: str = "run the pipeline again: the materialize stage finds damaged shards and prepares their rows again",
    ) -> None:
        super().__init__(message, problems=problems, next_step=next_step)


class TrainingError(PenstockError):
    """The training stage failed and its retries are used up."""

    exit_code = 5
    usual_next_step = "correct the code, and run the same command again; `penstock check` tries it on a batch first"


class CheckpointError(TrainingError):
    """A checkpoint cannot be written, or none of those present can be believed."""

    usual_next_step = ""


class ResumeError(PenstockError):
    """Continuing this run would break a promise (see docs/resume.md)."""

    exit_code = 6


class LeaseHeldError(ResumeError):
    """Another living process owns the run."""


class Interrupted(PenstockError):
    """A signal asked the run to stop; the work up to `signum` is saved."""

    def __init__(self, signum: int, message: str = "", *, next_step: str = "") -> None:
        name = signal.Signals(signum).name
        super().__init__(message or f"stopped by {name}", next_step=next_step)
        self.signum = signum

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """Return 128 + the signal's number, as shells do."""
        return 128 + self.signum
