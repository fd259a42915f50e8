"""What differs between xgboost and lightgbm? A base class for both, and their input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import SpecError, TrainingError
from penstock.ingest.feed.batch import Feed
from penstock.ingest.schema import FeedSchema
from penstock.messages import did_you_mean
from penstock.training.frameworks.boosted.table import FeatureTable, Floats
from penstock.training.ranks import Group

__all__ = ["Forest", "Library", "ShardTable", "Task", "Trees", "choose_objective", "refuse_unused"]


@dataclass(frozen=True)
class Task:
    """The data and the parameters of a training.

    Attributes:
        schema: of the rows.
        params: the user's, by the library's names.
        seed: of all random draws.
        threads: of one rank.
    """

    schema: FeedSchema
    params: Mapping[str, Any]
    seed: int
    threads: int

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
        """Names of the features."""
        return self._table.names

    def batches(self) -> Iterator[tuple[Floats, Floats]]:
        """Yield (features [rows, features], labels [rows]) of every batch that has rows."""
        for batch in self._feed.batches(0):
            if batch.rows:
                yield self._table.matrix(batch.columns), self._table.labels(batch.columns)


def refuse_unused(library: str, params: Iterable[str], used: Collection[str]) -> None:
    """Refuse parameters that the library would ignore with only a log line.

    Raises:
        SpecError: some are unused; similar names are suggested.
    """
    problems = []
    for name in params:
        if name not in used:
            problems.append(f"train.params.{name} is not used{did_you_mean(name, used)}")
    if problems:
        raise SpecError(
            f"{library} does not use some of the parameters",
            problems=problems,
            next_step="correct or delete them in train.params",
        )


class Trees(Protocol):
    """The trees of one rank while they grow. Every rank has the same ones."""

    def grow(self, number: int) -> None:
        """Grow round `number`, from 0. A collective; its random draws depend on the seed and the number alone."""

    def predictions(self, split: Literal["train", "validation"]) -> NDArray[Any]:
        """Predict this rank's rows: probabilities or values, [rows] or [rows, classes]."""

    def train_loss(self) -> float | None:
        """Mean over this rank's train rows, equal to `loss_of`; None where only predictions give it."""

    def content(self, rounds: int) -> bytes:
        """Encode the first `rounds` rounds as a file; equal trees give equal bytes."""


class Forest(Protocol):
    """Grown trees."""

    def predict(self, matrix: Floats) -> NDArray[Any]:
        """Predict any rows, as `Trees.predictions`."""

    def gains(self) -> NDArray[np.float64]:
        """Sum the gains of the splits at each feature, [features]."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""

    @property
    def names(self) -> list[str]:
        """Names of the features."""

    @property
    def objective(self) -> tuple[str, int]:
        """The library's name of it, and the number of trees in a round."""


class Library(ABC):
    """xgboost or lightgbm. Stateless and picklable; its module imports no Ray."""

    name: str
    """The name in `train.framework`."""
    distribution: str
    """The installed distribution."""
    version: str
    loader: str
    """See `Framework.loader`."""
    file: str
    """The file of a checkpoint that holds the trees."""
    for_few_rows: Mapping[str, Any]
    """Parameters with which two rows can be learned."""
    trees_of: Callable[..., Trees]
    """Called with (params, task, train, validation, content of a checkpoint or None): begins, or continues."""
    forest: Callable[..., Forest]
    """Called with the content of a file."""
    refusal: type[Exception]
    """The library's exception for wrong parameters or rows."""
    lost: tuple[str, ...]
    """Words in that exception when another rank has died."""

    @abstractmethod
    def settings(self, task: Task) -> dict[str, Any]:
        """Merge the user's parameters with the pipeline's defaults.

        Raises:
            SpecError: a parameter does not fit the label, or breaks exact resume.
        """

    @abstractmethod
    def check(self, params: Mapping[str, Any]) -> None:
        """Check the parameters without the data. Raises SpecError."""

    @abstractmethod
    def most_leaves(self, params: Mapping[str, Any]) -> int:
        """Estimate the most leaves that a round adds for each class."""

    @abstractmethod
    def _joined(self, group: Group, host: str) -> AbstractContextManager[dict[str, Any]]:
        """Connect more than one rank; see `joined`."""

    @abstractmethod
    def changes_earlier_trees(self, params: Mapping[str, Any]) -> bool:
        """Whether a round changes the trees of the rounds before it: DART."""

    def main_name(self, name: str) -> str:
        """Return the name of a parameter that has several."""
        return name

    def not_repeatable(self, params: Mapping[str, Any]) -> str | None:
        """Explain why a continued training differs from an undisturbed one; None if it does not."""
        return None

    def joined(self, group: Group, host: str) -> AbstractContextManager[dict[str, Any]]:
        """Connect the ranks for the block, which gets parameters for the trees. A collective.

        Args:
            host: address of this rank for the others.
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
        """Raise a refusal, which a restart would only repeat, as a user's error.

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
        """Extract the message of a refusal."""
        return str(error).strip()


def choose_objective(task: Task, fitting: Mapping[str, tuple[str, ...]], given: Any) -> str:
    """Choose the objective of a task: the user's, or the first that fits the label's kind.

    Args:
        fitting: `binary`, `classes` and `number` to the objectives whose predictions are probabilities, or values.
        given: the user's, if there is one.

    Raises:
        SpecError: the objective does not fit.
    """
    classes = task.schema.num_classes
    kind = "number" if classes is None else "binary" if classes == 2 else "classes"
    if given is None:
        return fitting[kind][0]
    if given not in fitting[kind]:
        found = "a number" if classes is None else f"one of {classes} classes"
        raise SpecError(
            f"train.params.objective is {given!r}, and the label {task.schema.label!r} is {found}",
            next_step=f"leave it out, or choose one of {', '.join(fitting[kind])}",
        )
    return str(given)
