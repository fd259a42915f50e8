"""How do boosted trees become a framework, and what differs between xgboost and lightgbm? A base class for both."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from numpy.typing import NDArray

from penstock.errors import SpecError, TrainingError
from penstock.messages import did_you_mean
from penstock.storage import Storage
from penstock.training.frameworks.boosted.model import BoostedModel, BoostedPredicts, Forest
from penstock.training.frameworks.boosted.table import ShardTable, Task
from penstock.training.frameworks.on_workers import OnWorkers
from penstock.training.model import ModelSpec, Predicts
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

if TYPE_CHECKING:
    from penstock.training.on_ray.worker import RankResult

__all__ = ["PATIENCE", "Library", "Trees", "refuse_unused"]

PATIENCE = "early_stopping_rounds"
"""The only one of `train.params` that the library does not get."""

_RANK = "penstock.training.frameworks.boosted.rank"
"""Imported in the ranks alone: loaders of models import this module, without Ray."""

_ROUNDS = ("num_boost_round", "num_iterations", "n_estimators", "num_rounds", "num_trees", "n_iter")

_DECIDED = {
    **dict.fromkeys(_ROUNDS, "train.epochs is the number of rounds"),
    **dict.fromkeys(("nthread", "n_jobs", "num_threads"), "train.cpus_per_worker is the number of threads"),
    **dict.fromkeys(("seed", "random_state"), "shuffle.seed is the seed"),
    "num_class": "the label decides the number of classes",
    **dict.fromkeys(("device", "device_type"), "trees are trained on CPUs"),
    **dict.fromkeys(("eval_metric", "metric"), "train.checkpoint.best and evaluate.metrics name the metrics"),
    "early_stopping_round": f"write {PATIENCE}",
}
"""Parameter, by the library's main name -> what takes its place."""

_BOOSTING = ("booster", "boosting")

_OF_OTHERS = ("callbacks", "precision", "compile", "accumulate", "clip_norm", "learning_rate")


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

    def content(self, rounds: int) -> bytes:
        """Encode the first `rounds` rounds, and the names of classes, as a file; equal trees give equal bytes."""


class Library(OnWorkers, ABC):
    """xgboost or lightgbm. See `penstock.training.frameworks.framework.Framework`. Stateless and picklable."""

    a_step = "a round, which learns from all rows of the train split, or from those that the library draws of them"
    on_cpus = True
    logged = ()
    """As of `TriedBatch`: trees have no charts of their own."""
    name: str
    """The name in `train.framework`."""
    libraries: tuple[str, ...]
    version: str
    loader: str
    model_files: tuple[str, ...]
    """The file of a checkpoint that holds the trees."""
    trees_of: Callable[..., Trees]
    """Called with (params, task, train, validation, content of a checkpoint or None): begins, or continues."""
    forest: Callable[..., Forest]
    """Called with the content of a file."""
    refusal: type[Exception]
    """The library's exception for wrong parameters or rows."""
    lost: tuple[str, ...]
    """Words in that exception when another rank has died."""
    fitting: Mapping[str, tuple[str, ...]]
    """`binary`, `classes` and `number` -> objectives that predict probabilities, or values; the first is the default."""
    usual: Mapping[str, Any]
    """Defaults of parameters."""
    values: Mapping[str, tuple[Any, ...]]
    """Parameter -> its only values: others train on other input, or cannot continue exactly."""
    decided: Mapping[str, str] = {}
    """More of `_DECIDED`."""
    known: Collection[str] = ()
    """All names of parameters, where the library lists them."""

    @property
    def run_rank(self) -> Callable[..., RankResult]:
        """Grows rounds with this library."""
        return partial(_run_rank, self)

    def load(self, spec: ModelSpec, files: Storage) -> BoostedModel:
        """Load the trees; `files` are a checkpoint's, or those of a registered model."""
        return BoostedModel(spec.feed_schema, self.forest(files.read_bytes(self.model_files[0])))

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Check the section without the data.

        Raises:
            SpecError: there is a recipe, or parameters do not fit; all are listed.
        """
        given = {name: value for name, value in spec.params.items() if name != PATIENCE}
        main, decided = {name: self.main_name(name) for name in given}, {**_DECIDED, **self.decided}
        names = [*main.values()]
        problems = [f"params.{name}: {decided[main[name]]}" for name in main if main[name] in decided]
        problems += [f"params.{name}: {main[name]} is given twice" for name in main if names.count(main[name]) > 1]
        for name, value in given.items():
            if value not in (allowed := self.values.get(main[name], (value,))):
                problems.append(f"params.{name} is {value!r}; it can be {' or '.join(map(str, allowed))}")
        unread = spec.set_by_user(_OF_OTHERS)
        problems += [f"{name}: {self.name} does not read it; its own settings are in params" for name in unread]
        if spec.recipe is not None:
            problems.append(f"recipe: trees need no code; params.objective names one of {self.name}'s")
        if not spec.set_by_user(["epochs"]) and spec.max_steps is None:
            problems.append("epochs is missing: it is the number of rounds, such as 200")
        if spec.checkpoint.best is not None and "dart" in (given[name] for name in main if main[name] in _BOOSTING):
            problems.append("checkpoint.best: DART changes the trees of earlier rounds, so the best round is lost; take it out")
        if PATIENCE in spec.params and spec.checkpoint.best is None:
            problems.append(f"params.{PATIENCE} needs checkpoint.best, such as {{metric: val/loss, mode: min}}")
        if problems:
            raise SpecError(
                f"train does not fit {self.name}",
                problems=[f"train.{problem}" for problem in problems],
                next_step="correct the train section; docs/boosted.md has an example",
            )
        if self.known:
            refuse_unused(self.name, given, self.known)
        return BoostedPredicts()

    def settings(self, task: Task) -> dict[str, Any]:
        """Merge the user's parameters, by their main names, with the pipeline's defaults.

        Raises:
            SpecError: the objective does not fit the label.
        """
        params, classes = {self.main_name(name): value for name, value in task.params.items()}, task.schema.num_classes
        fitting = self.fitting["number" if classes is None else "binary" if classes == 2 else "classes"]
        objective = params.get("objective") or fitting[0]
        if objective not in fitting:
            found = "a number" if classes is None else f"one of {classes} classes"
            raise SpecError(
                f"train.params.objective is {objective!r}, and the label {task.schema.label!r} is {found}",
                next_step=f"leave it out, or choose one of {', '.join(fitting)}",
            )
        more = {"num_class": classes} if (classes or 0) > 2 else {}
        ours = {"seed": task.seed, self.main_name("nthread"): task.threads, **more}
        return {**self.usual, **ours, **params, "objective": str(objective)}

    @abstractmethod
    def joined(self, group: Group, host: str) -> AbstractContextManager[dict[str, Any]]:
        """Connect several ranks for the block, which gets parameters for the trees. A collective.

        Args:
            host: address of this rank for the others.
        """

    def main_name(self, name: str) -> str:
        """Return the name of a parameter that has several."""
        return name

    def not_repeatable(self, params: Mapping[str, Any]) -> str | None:
        """Explain why a continued training differs from an undisturbed one; None if it does not."""
        return None

    def trees(
        self, task: Task, train: ShardTable, validation: ShardTable | None, content: bytes | None, more: Mapping[str, Any]
    ) -> Trees:
        """Begin, or continue from the content of a checkpoint. A collective.

        Args:
            more: parameters besides the task's: those of `joined`.

        Raises:
            TrainingError: the library refuses the parameters or the rows.
        """
        with self.reraising():
            return self.trees_of({**self.settings(task), **more}, task, train, validation, content)

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


def _run_rank(library: Library, *given: Any, **options: Any) -> RankResult:
    result: RankResult = importlib.import_module(_RANK).run_boosted_rank(library, *given, **options)
    return result
