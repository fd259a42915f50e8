"""How does Lightning's Trainer train a LightningModule in penstock's ranks?"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PreflightError, TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.lightning.library import DISTRIBUTIONS, lightning_of, make_module, quiet, refuse_averages
from penstock.training.frameworks.lightning.loading import STATE, WEIGHTS, LightningModel
from penstock.training.frameworks.loops.own_loop import OwnLoop, installed, refuse_unread
from penstock.training.frameworks.torch.one_batch import refusing_broadcasts, without_label
from penstock.training.model import Predicts
from penstock.training.own_values import OwnValues, collecting
from penstock.training.recipe import Recipe
from penstock.training.rng import seed_rng
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["LIGHTNING", "LightningFramework"]

_UNREAD = {
    "learning_rate": "configure_optimizers() sets it, from train.params if you like",
    "accumulate": "raise train.batch_rows, or optimize by hand in training_step()",
    "compile": "call torch.compile in configure_model()",
    "callbacks": "configure_callbacks() returns Lightning's",
    "validate_every_steps": "the end of each epoch validates",
    "last_batch": "the last batch of an epoch is kept",
}
"""Field that is not read -> the way to do it here."""


class LightningFramework(OwnLoop):
    """See `penstock.training.frameworks.framework.Framework`."""

    loader = "penstock.training.frameworks.lightning.loading:load"
    model_files = (WEIGHTS, STATE)
    fit = "penstock.training.frameworks.lightning.loop:fit"

    @property
    def libraries(self) -> tuple[str, ...]:
        """Torch and the installed Lightning."""
        there = installed(*DISTRIBUTIONS)
        if not there:
            raise PreflightError("train.framework: lightning is not installed", next_step='pip install "penstock[lightning]"')
        return ("torch", *there)

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Construct the module; refuse settings that only penstock's own loop reads."""
        refuse_unread(spec, _UNREAD)
        _ = self.libraries
        return LightningModel(make_module(code, spec.params), code.target)

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Let a Trainer learn one batch and validate it, as Lightning's hooks expect; then predict."""
        seed_rng(seed)
        module = make_module(code, spec.params)
        columns = dict(batch.columns)
        user_code = Recipe(module, code.target).reraise_as_user_error("the first batch")
        with refusing_broadcasts(code.target), user_code, collecting(OwnValues(None, "train")):
            value = learn_once(module, columns, spec.epochs)
        if module.automatic_optimization and not math.isfinite(value):
            raise TrainingError(
                f"{code.target}: the loss of the first batch is {value}",
                next_step="check the columns' values (scale, missing values), and return the loss of the step",
            )
        model = LightningModel(module.eval(), code.target)
        shape = None
        with torch.no_grad(), collecting(OwnValues(None, "val")):
            with Recipe(module, code.target).reraise_as_user_error("validation_step, else training_step, after training"):
                evaluated = float(model.loss(columns))
            if model.can_predict:
                shape = list(without_label(lambda given: model.predict(given, batch.rows), columns, schema.label).shape)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        loss = next((each for each in (value, evaluated) if math.isfinite(each)), None)
        return TriedBatch(
            loss=loss,
            parameters=parameters,
            weights_bytes=parameters * 4,
            checkpoint_bytes=parameters * 16,
            predict_shape=shape,
        )


def learn_once(module: Any, columns: Mapping[str, Tensor], epochs: int) -> float:
    """Fit a module to one batch, and validate it; all hooks of Lightning are called. Returns the loss, NaN without one."""
    pl = lightning_of(type(module))
    losses: list[float] = []

    class Once(pl.callbacks.Checkpoint):  # type: ignore[misc, name-defined]  # then the Trainer makes no checkpoints of its own
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            refuse_averages(trainer.callbacks)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            losses.append(float(loss.detach()) if isinstance(loss, Tensor) else math.nan)
            trainer.should_stop = True

    with tempfile.TemporaryDirectory(prefix="penstock-lightning-") as folder, quiet(pl):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            limit_val_batches=1,
            callbacks=[Once()],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, _Batches(columns), _Batches(columns))
    return losses[0]


@dataclass(frozen=True)
class _Batches:
    """A data loader that gives one batch over and over: schedules are made for an epoch of many steps."""

    columns: Mapping[str, Tensor]

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return itertools.repeat(dict(self.columns), len(self))


LIGHTNING = LightningFramework()
