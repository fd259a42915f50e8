"""Does one batch pass through the recipe: augment, forward, loss, backward, predict? On the device that trains."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator

import torch

from penstock.errors import TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.ingest.shuffle.row_generator import RowGenerator
from penstock.messages import in_yaml
from penstock.training.checkpoint.matching import shapes_of
from penstock.training.evaluation.metrics import label_kind
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.own_values import OwnValues, collecting
from penstock.training.recipe import Columns, Recipe, load_recipe
from penstock.training.rng import seed_rng
from penstock.training.spec import TrainSpec
from penstock.training.step.unsaved import changed_parts, parts_of
from penstock.usercode.capture import UserCode

__all__ = ["refusing_broadcasts", "try_batch", "without_label"]

_BROADCASTS = r".*Using a target size .* that is different to the input size"

_LOGS = re.compile(r"\b(penstock|mlflow)\b")


def try_batch(code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
    """Send one batch through the recipe.

    Raises:
        TrainingError: the user's code fails; names its file and line.
    """
    with collecting(OwnValues(None, "train")):  # a wrong logged value is found here, too
        return _try_batch(code, spec, schema, batch, seed)


def _try_batch(code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
    seed_rng(seed)  # as a worker does: the weights that training begins with
    recipe = load_recipe(code, spec.params)
    device = torch.device("cuda" if spec.gpus != 0 and torch.cuda.is_available() else "cpu")
    model = recipe.build_model(schema).to(device)
    columns = _augmented(recipe, batch, schema.packed, code.target) if recipe.has("augment") else batch.columns
    there = {name: column.to(device) for name, column in columns.items()}
    built = parts_of(model)
    with refusing_broadcasts(code.target):
        loss = recipe.loss(model, there)
    value = loss.detach().item()
    if not math.isfinite(value):
        raise TrainingError(
            f"{code.target}: the loss of the first batch is {value}",
            next_step="look at the columns' values (scale, missing values) and at the loss function",
        )
    if recipe.has("training_step"):
        optimizer = recipe.optimizer(model.train(), spec.learning_rate)
        recipe.scheduler(optimizer)
        with recipe.reraise_as_user_error("a step of training"):
            recipe.training_step(model, there, optimizer)
    else:
        loss.backward()  # type: ignore[no-untyped-call]
    if not recipe.has("training_step") and (recipe.has("optimizer") or recipe.has("scheduler")):
        # Not without either: torch loads its compiler with the first optimizer.
        recipe.scheduler(recipe.optimizer(model, spec.learning_rate))
    shape: list[int] | None = None
    there = {name: column.to(device) for name, column in batch.columns.items()}
    predict = torch.no_grad()(
        lambda: without_label(lambda given: recipe.predict(model, given, batch.rows), there, schema.label)
    )
    with torch.no_grad(), collecting(OwnValues(None, "val")) as charted:
        recipe.loss(model.eval(), there)
        output = predict() if recipe.can_predict else None
    if changed := changed_parts(built, parts_of(model)):
        raise TrainingError(
            f"{code.target}: the first batch has changed which state the model has: {', '.join(changed)}; a trained model "
            "could not be loaded into what build_model() makes",
            next_step="make every parameter and buffer in build_model(), with the shape that it keeps",
        )
    if output is not None:
        if label_kind(schema) in ("classification", "multilabel"):
            recipe.refuse_undeclared(output, schema.num_classes, model, predict)
            if (schema.num_classes or 0) > 2 and output.shape[1:] in ((), (1,)) and not recipe.has("metrics"):
                raise TrainingError(
                    f"{code.target}.predict returned one number a row; label {schema.label!r} has {schema.num_classes} classes",
                    next_step="return [rows, schema.num_classes]; if the label is a quantity, cast it: "
                    f"preprocess: - cast: {{{in_yaml(str(schema.label))}: float32}}",
                )
        shape = list(output.shape)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return TriedBatch(
        loss=value,
        parameters=parameters,
        predict_shape=shape,
        weights=shapes_of(model.state_dict()),
        logged=None if any(_LOGS.search(text) for path, text in code.files.items() if path.endswith(".py")) else charted.names,
    )


@contextlib.contextmanager
def refusing_broadcasts(target: str) -> Iterator[None]:
    """Refuse a loss of [rows] against [rows, 1], of which torch warns only: each row would be compared with all labels.

    Raises:
        TrainingError: the block's loss does so.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", _BROADCASTS)
        try:
            yield
        except TrainingError as error:
            if not re.search(_BROADCASTS, error.message):
                raise
            raise TrainingError(error.message, next_step=f"{target}: give both the same shape, as by output[:, 0]") from error


def without_label(predict: Callable[[Columns], torch.Tensor], columns: Columns, label: str | None) -> torch.Tensor:
    """Predict without the label, as a registered model must.

    Raises:
        TrainingError: the user's code fails; if it needs the label, with advice.
    """
    try:
        return predict({name: column for name, column in columns.items() if name != label})
    except (KeyError, TrainingError) as error:
        message = error.message if isinstance(error, TrainingError) else f"predicting failed: KeyError: {error}"
        if label is None or repr(label) not in message:
            raise
        raise TrainingError(
            message, next_step=f"predict without {label!r}: the rows that a registered model gets do not have it"
        ) from error


def _augmented(recipe: Recipe, batch: Batch, packed: Collection[str], target: str) -> dict[str, torch.Tensor]:
    """Augment the batch. Raises TrainingError if the result depends on more than the given generator."""
    made = []
    for seed in (1, 2):
        seed_rng(seed)
        copied = {name: column.clone() for name, column in batch.columns.items()}
        made.append(recipe.augment(copied, RowGenerator(0, 0, batch.row_ids), packed))
    for name in made[0].keys() | made[1].keys():
        first, second = (columns.get(name) for columns in made)
        same = first is not None and second is not None and first.shape == second.shape
        if not same or not torch.allclose(first, second, rtol=0, atol=0, equal_nan=True):  # type: ignore[arg-type]
            raise TrainingError(
                f"{target}: augment() is not repeatable: column {name!r} differs between two calls, and so would a resumed run",
                next_step="draw from `generator` (random, normal, integers), not from torch's, numpy's or Python's own",
            )
    return made[0]
