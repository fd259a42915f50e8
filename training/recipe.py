"""Which methods does a recipe, the user's class that trains a model, have, and how are they called?

A recipe is a plain class; there is no base class to import. Its constructor takes `train.params`.

    class Classifier:
        def __init__(self, hidden=256): ...
        def build_model(self, schema) -> nn.Module        # required; or a dict of them, which becomes an nn.ModuleDict;
                                                          #   schema: penstock.ingest.schema.FeedSchema
        def loss(self, model, batch) -> Tensor | dict     # required; scalar, the mean over the batch's rows; or a dict with
                                                          #   it as "loss" and other means over rows, which are charted
        def predict(self, model, batch) -> Tensor         # for metrics: logits [rows, classes], or [rows] of a two-class label,
                                                          #   or values [rows] of a regression
        predicts = "logits"                               # or "probabilities"
        def optimizer(self, model) -> Optimizer           # default: AdamW with train.learning_rate
        def scheduler(self, optimizer) -> LRScheduler     # default: none
        def training_step(self, model, batch, optimizer)  # instead of backward of `loss` and the optimizer's step: it does
                                                          #   both, for as many optimizers as `optimizer` returns in a dict
                                                          #   (`scheduler` may return a dict then), and returns what `loss` does
        scheduler_every = "step"                          # or "epoch"
        def metrics(self) -> dict[str, Metric]            # torchmetrics (or a MetricCollection), updated with
                                                          #   (predict, label), without a label with (predict)
        def measure(self, metrics, output, batch)         # updates `metrics` itself, as for several targets
        def augment(self, batch, generator) -> batch      # training only, on the CPU, in the prefetch thread; random
                                                          #   numbers come from `generator`, a penstock RowGenerator

`batch` maps column names to tensors with the rows in front, on the worker's device. `model` is the module `build_model`
returned (compiled with `train.compile`), on one worker or many, so its own methods and attributes can be used. Attributes
of the recipe, and of the model outside its state_dict, are not in checkpoints: keep such state in buffers.

The loss must be a mean over rows: the mean over a global batch is that of the ranks' means, weighted by their rows.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError, SpecError, TrainingError
from penstock.ingest.feed.cursor import check_augmented
from penstock.ingest.schema import FeedSchema
from penstock.ingest.shuffle.row_generator import RowGenerator
from penstock.installed import PACKAGE_DIR
from penstock.messages import counted, describe_error, shorten
from penstock.training.faults import device_error, may_pass
from penstock.training.model import ClassScores, are_probabilities
from penstock.training.own_values import record
from penstock.training.ranks import is_lost_peer

if TYPE_CHECKING:
    from penstock.training.spec import TrainSpec
    from penstock.usercode.capture import UserCode

__all__ = ["Columns", "Recipe", "RecipeModel", "build_by_user", "load_recipe"]

Columns = dict[str, Tensor]

REQUIRED = ("build_model", "loss")
_NOT_USER_CODE = (str(PACKAGE_DIR), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))


def load_recipe(code: UserCode, params: Mapping[str, Any]) -> Recipe:
    """Import the recipe's class and construct it with `params`.

    Raises:
        SpecError: the class cannot be imported or constructed, or a required method is missing; all findings at once.
    """
    kind = code.load()
    if not isinstance(kind, type):
        raise SpecError(f"train.recipe: {code.target} is a {type(kind).__name__}, not a class")
    missing = [name for name in REQUIRED if not callable(getattr(kind, name, None))]
    if missing:
        methods = [name for name in dir(kind) if not name.startswith("_")]
        raise SpecError(
            f"train.recipe: {code.target} is not a recipe",
            problems=[f"it has no method {name}(); it has {methods}" for name in missing],
            next_step=f"write {' and '.join(missing)}; an example: penstock init NEW_FOLDER",
        )
    every = getattr(kind, "scheduler_every", "step")
    if every not in ("step", "epoch"):
        raise SpecError(f"train.recipe: {code.target}.scheduler_every is {every!r}; it must be 'step' or 'epoch'")
    predicts = getattr(kind, "predicts", "logits")
    if predicts not in get_args(ClassScores):
        raise SpecError(f"train.recipe: {code.target}.predicts is {predicts!r}; it must be 'logits' or 'probabilities'")
    return Recipe(build_by_user(code, lambda: kind(**code.located(params))), code.target)


def build_by_user(code: UserCode, build: Callable[[], Any]) -> Any:
    """Call `build`, which calls the user's code with `train.params`.

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
        raise SpecError(f"train.recipe: {code.target}(**train.params) failed: {_where(error)}") from error


class Recipe:
    """A user's recipe with the defaults filled in.

    An exception of the user's code becomes a TrainingError with file and line, unless another rank was lost.
    """

    def __init__(self, user: Any, target: str) -> None:
        self.user = user
        """The user's object."""
        self._target = target

    def has(self, method: str) -> bool:
        """Whether the user's class has this method."""
        return callable(getattr(self.user, method, None))

    @property
    def can_predict(self) -> bool:
        """Whether metrics other than the loss can be measured."""
        return self.has("predict")

    @property
    def can_measure(self) -> bool:
        """Whether the recipe updates its metrics itself."""
        return self.has("measure")

    def refuse_with_training_step(self, spec: TrainSpec) -> None:
        """Raise SpecError for settings that only penstock's own step honours."""
        asked = {"accumulate": spec.accumulate > 1, "compile": spec.compile, "precision: fp16": spec.precision == "fp16"}
        problems = [f"train.{name}" for name, set_ in asked.items() if set_ and self.has("training_step")]
        if problems:
            raise SpecError(
                f"{self._target} has a training_step() of its own, which calls backward and its optimizers itself",
                problems=[f"{name} cannot be honoured" for name in problems],
                next_step="take it out and do it in training_step(), or remove training_step()",
            )

    def measure(self, metrics: dict[str, Any], output: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Update metrics with one batch's predictions."""
        with self._reraise_in("measure"):
            self.user.measure(metrics, output, batch)

    def refuse_learning_rate(self, learning_rate: float) -> None:
        """Raise SpecError if the recipe's own optimizer does not read `train.learning_rate`, which is set."""
        if self.has("optimizer"):
            code = getattr(self.user.optimizer, "__code__", None)
            line = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
            raise SpecError(
                f"train.learning_rate is {learning_rate:g}, and {self._target} does not read it in its own optimizer(){line}",
                next_step="take train.learning_rate out and set the rate in optimizer(), or remove optimizer(), for AdamW",
            )

    @property
    def predicts(self) -> ClassScores:
        """Kind of the scores that `predict` returns for classes."""
        return getattr(self.user, "predicts", "logits")  # type: ignore[no-any-return]

    def refuse_undeclared(self, output: Tensor, classes: int | None, model: nn.Module, predict: Callable[[], Tensor]) -> None:
        """Raise TrainingError if predictions may be probabilities and the recipe does not declare them. Spoils the weights."""
        of_rows = output.shape[1:] == (classes,)
        looks = are_probabilities if of_rows else lambda found: bool(((found >= 0) & (found <= 1)).all())
        if hasattr(self.user, "predicts") or not looks(output):
            return
        for parameter in [*model.parameters()][-2:]:  # fresh logits may be from 0 to 1 by chance, and are not with such a head
            parameter.detach().mul_(-1000).sub_(1)
        if looks(other := predict()) and (of_rows or not output.equal(other)):
            raise TrainingError(
                f"{self._target}: predict() returned numbers from 0 to 1; are they probabilities or logits?",
                next_step='set it in the class: predicts = "probabilities", or predicts = "logits"',
            )

    @property
    def scheduler_every(self) -> Literal["step", "epoch"]:
        """When the scheduler steps."""
        return getattr(self.user, "scheduler_every", "step")  # type: ignore[no-any-return]

    def build_model(self, schema: FeedSchema) -> nn.Module:
        """Build the model, on the CPU.

        Raises:
            TrainingError: the user's code fails, or does not return a torch.nn.Module.
        """
        with self._reraise_in("build_model"):
            model = self.user.build_model(schema)
            if isinstance(model, dict):
                model = nn.ModuleDict(model)
        if not isinstance(model, nn.Module):
            raise TrainingError(f"{self._target}.build_model returned a {type(model).__name__}, not a torch.nn.Module")
        return model

    def loss(self, model: nn.Module, batch: Columns) -> Tensor:
        """Compute the mean loss over the batch's rows, a scalar.

        Raises:
            TrainingError: the user's code fails, or does not return a scalar tensor that depends on a parameter.
        """
        with self._reraise_in("loss"):
            loss = self._scalar(self.user.loss(model, batch), "loss")
        if not loss.requires_grad and torch.is_grad_enabled() and not self.has("training_step"):
            raise TrainingError(
                f"{self._target}: loss() returned a tensor that does not depend on the model's parameters, so there is nothing "
                "to learn from",
                next_step="compute it from model(...), without detach(), item() or no_grad(), and freeze not every parameter",
            )
        return loss

    def training_step(self, model: nn.Module, batch: Columns, optimizers: Any) -> Tensor:
        """Learn from this rank's rows. Returns the recipe's loss, a mean over them."""
        with self._reraise_in("training_step"):
            loss = self.user.training_step(model, batch, optimizers)
        return self._scalar(loss, "training_step")

    def _scalar(self, loss: Any, method: str) -> Tensor:
        if isinstance(loss, Mapping):
            for name, value in loss.items():
                if name != "loss":
                    record(name, value)
            loss = loss.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise TrainingError(
                f"{self._target}.{method} returned {found}; it must return a scalar: the mean over the batch's rows",
                next_step='return the scalar, or a dict with it as "loss" and the other values to chart',
            )
        return loss.reshape(())

    def predict(self, model: nn.Module, batch: Columns, rows: int) -> Tensor:
        """Predict the batch's rows, rows first. A packed column's tensor is longer than `rows`.

        Raises:
            TrainingError: the user's code fails, or does not return a tensor of `rows` rows.
        """
        with self._reraise_in("predict"):
            output = self.user.predict(model, batch)
        if not isinstance(output, Tensor) or output.ndim == 0 or len(output) != rows:
            found = f"a tensor of shape {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
            raise TrainingError(f"{self._target}.predict returned {found} for a batch of {rows} rows; rows come first")
        return output

    def optimizer(self, model: nn.Module, learning_rate: float) -> torch.optim.Optimizer | dict[str, torch.optim.Optimizer]:
        """Make the recipe's optimizer, or several by name, else AdamW.

        Raises:
            TrainingError: the code fails or does not return an optimizer of the model's parameters, or none is trainable.
        """
        if not self.has("optimizer"):
            trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
            if not trainable:
                raise TrainingError(f"{self._target}.build_model returned a model without trainable parameters")
            return torch.optim.AdamW(trainable, lr=learning_rate)
        with self._reraise_in("optimizer"):
            optimizer = self.user.optimizer(model)
        several = optimizer if isinstance(optimizer, dict) and self.has("training_step") and optimizer else {"": optimizer}
        if not all(isinstance(name, str) and isinstance(each, torch.optim.Optimizer) for name, each in several.items()):
            raise TrainingError(
                f"{self._target}.optimizer returned a {type(optimizer).__name__}, not a torch.optim.Optimizer",
                next_step="return one, or a dict of several by name, which training_step(self, models, batch, optimizers) "
                "calls (docs/recipe.md)",
            )
        own = {id(parameter) for parameter in model.parameters()}
        given = [each for part in several.values() for group in part.param_groups for each in group["params"]]
        if outside := [tuple(each.shape) for each in given if id(each) not in own]:
            raise TrainingError(
                f"{self._target}.optimizer has {counted(len(outside), 'parameter')} that the model does not have (of shape "
                f"{shorten(outside)}), and a checkpoint holds the model's parameters alone",
                next_step="make them a part of the model that build_model() returns: self.criterion = ... in its __init__()",
            )
        return optimizer  # type: ignore[no-any-return]

    def scheduler(self, optimizer: Any) -> Any:
        """Make the recipe's learning-rate scheduler, or several by name; None without one. `optimizer` is the recipe's.

        Raises:
            TrainingError: the user's code fails, or returns a scheduler whose `step` needs an argument.
        """
        if not self.has("scheduler"):
            return None
        with self._reraise_in("scheduler"):
            scheduler = self.user.scheduler(optimizer)
        for each in scheduler.values() if isinstance(scheduler, dict) else [scheduler]:
            wants = None if each is None else _required_arguments(each.step)
            if not wants:
                continue
            raise TrainingError(
                f"{self._target}.scheduler returned a {type(each).__name__}, whose step() needs {wants}; it gets none",
                next_step="use a schedule that counts steps or epochs, such as CosineAnnealingLR or LambdaLR",
            )
        return scheduler

    def metrics(self) -> dict[str, Any] | None:
        """Make the recipe's own torchmetrics by name; None leaves the choice to the label's kind."""
        if not self.has("metrics"):
            return None
        with self._reraise_in("metrics"):
            found = self.user.metrics()
            return dict(found.items())

    def augment(self, batch: Columns, generator: RowGenerator, packed: Collection[str] = ()) -> Columns:
        """Augment a batch; `packed` names its packed columns of lists.

        Raises:
            TrainingError: the user's code fails, or changes the number of rows.
        """
        with self._reraise_in("augment"):
            columns = self.user.augment(batch, generator)
        try:
            check_augmented(columns, generator.rows, packed)
        except SpecError as error:
            raise TrainingError(f"{self._target}.{error.message}", next_step=error.next_step) from error
        return dict(columns)

    @contextmanager
    def reraise_as_user_error(self, what: str) -> Iterator[None]:
        """Raise errors of a block in which torch calls user code (an optimizer, a hook) as the user's TrainingError."""
        try:
            yield
        except PenstockError:
            raise
        except Exception as error:
            # An error of the device or the system, without a line of the user's, may pass.
            passes = isinstance(error, RuntimeError | OSError) and not _user_frames(error) and not device_error(error, "")
            if is_lost_peer(error) or passes:
                raise
            raise self._failed(what, error) from error

    @contextmanager
    def _reraise_in(self, method: str) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except (Exception, SystemExit) as error:  # the user's code
            if is_lost_peer(error):
                raise
            raise self._failed(f"{method}()", error) from error

    def _failed(self, what: str, error: BaseException) -> TrainingError:
        frames = _user_frames(error)
        device = device_error(error, f" ({frames[-1]})" if frames else "")
        if device is not None:
            return device
        row = "Expected more than 1 value per channel" in str(error)  # of batch norm
        advice, passes = "correct the recipe and run the same command again", may_pass(error)
        if row:
            advice = "set train.last_batch: drop, or another train.batch_rows: the last batch has one row on this worker"
        elif passes:
            advice = "run the same command again; if it fails in the same way, look at the machine or the service"
        failed = TrainingError(f"{self._target}: {what} failed: {_where(error)}", problems=frames[:-1], next_step=advice)
        failed.transient = passes
        return failed


@dataclass(frozen=True)
class RecipeModel:
    """A recipe's model with its weights, as a `penstock.training.model.TrainedModel`."""

    recipe: Recipe
    model: nn.Module
    device: torch.device

    @property
    def can_predict(self) -> bool:
        """Whether the recipe has a `predict`."""
        return self.recipe.can_predict

    @property
    def predicts(self) -> ClassScores:
        """See `Recipe.predicts`."""
        return self.recipe.predicts

    @property
    def can_measure(self) -> bool:
        """Whether the recipe has a `measure`."""
        return self.recipe.can_measure

    def measure(self, metrics: dict[str, Any], output: Tensor, batch: Mapping[str, Tensor]) -> None:
        """See `Recipe.measure`."""
        self.recipe.measure(metrics, output, batch)

    def metrics(self) -> dict[str, Any] | None:
        """See `Recipe.metrics`."""
        return self.recipe.metrics()

    def importance(self) -> dict[str, float]:
        """Empty: unknown."""
        return {}

    def loss(self, batch: Columns) -> Tensor:
        """Compute the mean loss over the batch's rows, a scalar."""
        return self.recipe.loss(self.model, batch)

    def predict(self, batch: Columns, rows: int) -> Tensor:
        """Predict the batch's rows, rows first."""
        return self.recipe.predict(self.model, batch, rows)


def _required_arguments(function: Callable[..., Any]) -> str:
    """List the required arguments of `function`."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(each.name for each in parameters if each.default is each.empty and each.kind not in kinds)


def _where(error: BaseException) -> str:
    frames = _user_frames(error)
    return describe_error(error) + (f" ({frames[-1]})" if frames else "")


def _user_frames(error: BaseException) -> list[str]:
    """Format the user's frames as `file:line in function: source`, outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_NOT_USER_CODE, "<"))]
    return [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in own]
