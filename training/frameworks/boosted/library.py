"""What differs between the libraries that boost trees? A base class for both, and what they are given."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PenstockError, SpecError, TrainingError
from penstock.ingest.feed.batch import Feed
from penstock.ingest.schema import FeedSchema
from penstock.messages import said_of
from penstock.training.frameworks.boosted.table import FeatureTable, Floats
from penstock.training.ranks import Group
from penstock.usercode.capture import UserCode

__all__ = ["Forest", "Library", "OwnObjective", "ShardTable", "Task", "Trees", "choose_objective", "refuse_unused"]


class OwnObjective:
    """The function that `train.recipe` names: `(predictions, labels) -> (gradient, hessian)`, arrays of float32.

    Predictions are raw scores: [rows], or [rows, classes] for more than two classes. Labels are [rows].
    """

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._function = code.load()
        if not callable(self._function):
            raise SpecError(
                f"train.recipe: {code.target} is no function",
                next_step="name a function (predictions, labels) -> (gradient, hessian), or leave train.recipe out",
            )

    def __call__(self, predictions: Floats, labels: Floats) -> tuple[Floats, Floats]:
        """Both derivatives of the loss of every row, in the shape of `predictions`. Raises TrainingError if the code fails."""
        target = self._code.target
        try:
            gradient, hessian = (np.asarray(part, np.float32) for part in self._function(predictions, labels))
        except PenstockError:
            raise
        except Exception as error:  # the user's code
            raise TrainingError(
                f"{target} failed: {said_of(error)}",
                next_step="correct the function and run the same command again",
            ) from error
        if gradient.shape != predictions.shape or hessian.shape != predictions.shape:
            raise TrainingError(
                f"{target} returned shapes {gradient.shape} and {hessian.shape} for predictions of {predictions.shape}",
                next_step="return the gradient and the hessian of each prediction",
            )
        return gradient, hessian


@dataclass(frozen=True)
class Task:
    """What is learned, and how.

    Attributes:
        schema: of the rows.
        params: as the user wrote them; the library's own names.
        seed: of everything that is drawn.
        threads: of one rank.
        code: what `train.recipe` names; its target is empty where there is none.
    """

    schema: FeedSchema
    params: Mapping[str, Any]
    seed: int
    threads: int
    code: UserCode

    @cached_property
    def own(self) -> OwnObjective | None:
        """The user's objective."""
        return OwnObjective(self.code) if self.code.target else None

    @cached_property
    def table(self) -> FeatureTable:
        """The matrix behind the columns."""
        return FeatureTable(self.schema)


class ShardTable:
    """One rank's rows of a split, batch by batch; every pass reads them again.

    Args:
        table: how columns become features.
        feed: with batches on the CPU.
    """

    def __init__(self, table: FeatureTable, feed: Feed) -> None:
        self._table, self._feed = table, feed

    @property
    def names(self) -> list[str]:
        """Of the features."""
        return self._table.names

    def batches(self) -> Iterator[tuple[Floats, Floats]]:
        """(features [rows, features], labels [rows]) of every batch that has rows."""
        for batch in self._feed.batches(0):
            if batch.rows:
                yield self._table.matrix(batch.columns), self._table.labels(batch.columns)


def refuse_unused(library: str, params: Iterable[str], used: Collection[str]) -> None:
    """Refuse parameters that the library would ignore with only a log line.

    Raises:
        SpecError: with the names that were perhaps meant.
    """
    problems = []
    for name in params:
        if name not in used:
            close = difflib.get_close_matches(name, sorted(used), 1)
            problems.append(f"train.params.{name}: it has no use for that" + (f"; did you mean {close[0]}?" if close else ""))
    if problems:
        raise SpecError(
            f"{library} would train without some of the parameters",
            problems=problems,
            next_step="correct or delete them in train.params",
        )


class Trees(Protocol):
    """The trees of one rank while they grow. Every rank has the same ones."""

    def grow(self, number: int) -> None:
        """Do round `number`, from 0. A collective; what is drawn in it depends on the seed and the number alone."""

    def predictions(self, split: Literal["train", "validation"]) -> NDArray[Any]:
        """For this rank's rows: probabilities or values, or with an own objective raw scores. [rows] or [rows, classes]."""

    def train_loss(self) -> float | None:
        """Mean over this rank's train rows, as `loss_of` has it; None where the library must be asked for predictions."""

    def content(self, rounds: int) -> bytes:
        """The first `rounds` rounds as a file; the same bytes whenever it is asked."""


class Forest(Protocol):
    """Trees that are grown."""

    def predict(self, matrix: Floats) -> NDArray[Any]:
        """As `Trees.predictions`, for any rows."""

    def gains(self) -> NDArray[np.float64]:
        """How much the splits at each feature gained together, [features]."""


class Library(ABC):
    """xgboost or lightgbm. Stateless and picklable; a module of this kind imports no Ray."""

    name: str
    """As in `train.framework`."""
    distribution: str
    """What is installed."""
    version: str
    loader: str
    """As of a Framework."""
    file: str
    """What a checkpoint holds the trees in."""
    for_few_rows: Mapping[str, Any]
    """Parameters with which two rows can be learned."""
    trees_of: Callable[..., Trees]
    """Called with (params, task, train, validation, content of a checkpoint or None): begins, or continues."""
    forest: Callable[..., Forest]
    """Called with (content, raw=...): trees from a file; `raw` gives raw scores, for an own objective."""
    refusal: type[Exception]
    """The library's error for parameters or rows."""
    lost: tuple[str, ...]
    """Words of that error when another rank is gone."""

    @abstractmethod
    def settings(self, task: Task) -> dict[str, Any]:
        """All parameters of the library: the user's, with the pipeline's where they leave it open.

        Raises:
            SpecError: one does not fit the label, or would undo what the pipeline promises.
        """

    @abstractmethod
    def check(self, params: Mapping[str, Any]) -> None:
        """Check what can be judged without the data. Raises SpecError."""

    @abstractmethod
    def most_leaves(self, params: Mapping[str, Any]) -> int:
        """About how many leaves a round adds for each class at most."""

    @abstractmethod
    def _joined(self, group: Group, host: str) -> AbstractContextManager[dict[str, Any]]:
        """As `joined`, for more than one rank."""

    def not_repeatable(self, params: Mapping[str, Any]) -> str | None:
        """Why a training that is continued differs from one that was not interrupted; None if it does not."""
        return None

    def joined(self, group: Group, host: str) -> AbstractContextManager[dict[str, Any]]:
        """Connect the ranks for the block, which gets parameters that the trees need for it. A collective.

        Args:
            host: where the other ranks reach this one.
        """
        return self._joined(group, host) if group.world_size > 1 else nullcontext({})

    def trees(
        self,
        task: Task,
        train: ShardTable,
        validation: ShardTable | None,
        content: bytes | None,
        more: Mapping[str, Any],
    ) -> Trees:
        """Begin, or continue from the content of a checkpoint. A collective.

        Args:
            more: parameters besides the task's: those of `joined`, or `for_few_rows`.

        Raises:
            TrainingError: the library refuses the parameters or the rows.
        """
        with self.reraising():
            return type(self).trees_of({**self.settings(task), **more}, task, train, validation, content)

    @contextmanager
    def reraising(self) -> Iterator[None]:
        """Turn a refusal, which every restart would meet again, into an error that a user can act on.

        Raises:
            TrainingError: the library refuses the parameters or the rows.
        """
        try:
            yield
        except self.refusal as error:
            if any(word in str(error).lower() for word in self.lost):
                raise
            raise TrainingError(
                f"{self.name} refuses: {self.reason(error)}", next_step="correct train.params and run the same command again"
            ) from error

    def reason(self, error: Exception) -> str:
        """The message of a refusal."""
        return str(error).strip()


def choose_objective(task: Task, fitting: Mapping[str, tuple[str, ...]], given: Any) -> str:
    """The objective of a task: the user's, or the first that fits the label's kind.

    Args:
        fitting: `binary`, `classes` and `number` to the objectives whose predictions are probabilities, or values.
        given: what the user wrote, if anything.

    Raises:
        SpecError: it does not fit.
    """
    classes = task.schema.num_classes
    kind = "number" if classes is None else "binary" if classes == 2 else "classes"
    if given is None or task.own is not None:
        return fitting[kind][0]
    if given not in fitting[kind]:
        found = "a number" if classes is None else f"one of {classes} classes"
        raise SpecError(
            f"train.params.objective is {given!r}, and the label {task.schema.label!r} is {found}",
            next_step=f"leave it out, or choose one of {', '.join(fitting[kind])}; train.recipe names one of your own",
        )
    return str(given)
