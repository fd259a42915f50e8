"""How does the transformers Trainer run on penstock's rows and in its ranks, and when does it save?

The Trainer writes its own checkpoint (weights, optimizer, schedule, its state), which is read with `weights_only`. The place in
the rows and the random generators are the session's (training/session/), so the Trainer neither skips rows nor draws them.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import transformers
from torch import nn

from penstock.training.checkpoint.matching import load_matching, start_weights
from penstock.training.faults import IN_THE_MODEL, not_a_number
from penstock.training.frameworks.loops.steps import REPORT_EVERY, Epochs, SavePlan, as_rank, train_epochs, validation
from penstock.training.frameworks.transformers.library import UsersModel
from penstock.training.frameworks.transformers.loading import TransformersModel
from penstock.training.job import TrainJob
from penstock.training.ranks import Group
from penstock.training.rng import keeping_rng, seed_rng
from penstock.training.session.session import Session
from penstock.training.step.unsaved import Unsaved, unsaved_state

__all__ = ["fit"]

_NOT_KEPT = ("training_args.bin", "rng_state*.pth")
"""A pickle, and the generators, which the session saves for all ranks."""

_METHODS = [each.__code__ for each in vars(transformers.Trainer).values() if hasattr(each, "__code__")]

_INTERNAL = {
    *("current_flos", "current_gradient_accumulation_steps", "is_in_train", "last_loss", *vars(nn.Module())),
    *(name for method in _METHODS for name in method.co_names if name.startswith("_")),
}
"""Attributes of every Trainer and module that change."""


def fit(job: TrainJob, group: Group, session: Session) -> None:
    """Train one rank's model to the end of the spec.

    Raises:
        SpecError: an epoch's last step has fewer rows than there are workers, or its steps cannot be counted.
        StopAtCheckpoint: the driver has asked for a stop, and this state is saved.
    """
    spec = job.spec
    users = UsersModel(job.code, spec.params)
    rows = train_epochs(job, group, session)
    model = users.build(job.manifest.feed_schema)
    newest = session.get_checkpoint()
    if newest is None and spec.start_from is not None:
        print(load_matching(model, start_weights(job.run_storage), spec.start_from))
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="penstock-transformers-") as folder, as_rank(group):
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=spec.epochs,
            max_steps=(job.total_steps or -1) if spec.max_steps is not None else -1,
            per_device_train_batch_size=spec.batch_rows // group.world_size,
            seed=job.seed,
            use_cpu=group.device.type != "cuda",
            bf16=spec.precision == "bf16",
            fp16=spec.precision == "fp16",
            ignore_data_skip=True,
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            report_to="none",
            **dict.fromkeys(("save_strategy", "eval_strategy", "logging_strategy"), "no"),
            **users.arguments,
        )
        trainer = _trainer(users, rows, job)(model=model, args=arguments, callbacks=[])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(_Saving(trainer, users, rows, job, group, session))
        seed_rng(job.seed, group.rank)  # dropout differs per rank
        trainer.train(resume_from_checkpoint=str(newest.path) if newest is not None else None)


def _trainer(users: UsersModel, rows: Epochs, job: TrainJob) -> Any:
    base: Any = users.trainer or transformers.Trainer
    label = job.manifest.feed_schema.label

    class OnRows(base):  # type: ignore[misc]  # the user's class
        """The Trainer, on the ranks' own rows."""

        last_loss = math.nan

        def get_train_dataloader(self) -> Any:
            return rows

        def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
            loss = super().training_step(model, users.inputs(self.model, inputs, label), *more, **options)
            self.last_loss = loss.item()
            if not math.isfinite(self.last_loss):
                raise not_a_number(
                    f"the training loss is {self.last_loss} at step {self.state.global_step + 1:,}", IN_THE_MODEL
                )
            return loss

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            if not isinstance(self.model, transformers.PreTrainedModel):
                super().save_model(output_dir, _internal_call)
            elif self.args.should_save:
                # Under the model's own names: the Trainer restores no others, and only warns.
                self.model.save_pretrained(output_dir, save_original_format=False)

        def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
            named = [users.inputs(self.model, batch, label) for batch in batch_samples]
            return super()._get_num_items_in_batch(named, device)

    return OnRows


class _Saving(transformers.TrainerCallback):
    """Validates, reports metrics, and saves as `train.checkpoint` sets; at an epoch's end after validation."""

    def __init__(self, trainer: Any, users: UsersModel, rows: Epochs, job: TrainJob, group: Group, session: Session) -> None:
        self._trainer, self._rows, self._group, self._session, self._users = trainer, rows, group, session, users.users
        model = TransformersModel(users, trainer.model, job.manifest.feed_schema, job.code.target)
        self._validate = validation(job, group, model)
        self._plan = SavePlan(job, group, session)
        self._values: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Look at state that no checkpoint holds, and whether a schedule ends at another step than before."""
        trainer, kept = self._trainer, transformers.trainer_callback.ExportableState
        others = {type(each).__name__: each for each in trainer.callback_handler.callbacks if not isinstance(each, kept)}
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        others |= {"recipe": self._users, "trainer": trainer, "optimizer": optimizer}
        self._outside = Unsaved(partial(unsaved_state, trainer.model, others, _INTERNAL))
        newest = self._session.get_checkpoint()
        if newest is not None and not str(args.lr_scheduler_type.value).startswith("constant"):
            before = json.loads(Path(newest.path, "trainer_state.json").read_text())["max_steps"]
            if before != state.max_steps:
                self._session.add_caveat(
                    f"the schedule depends on the number of steps: {before:,} before and {state.max_steps:,} now"
                )

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save in the middle of an epoch."""
        state.epoch = state.global_step / len(self._rows)  # it counts from 0 where an epoch goes on in its middle
        step = state.global_step
        self._outside.after_step()
        if step % len(self._rows) == 0 or step >= state.max_steps:
            return  # the epoch's end saves it
        validates = self._plan.validates(step)
        if step % REPORT_EVERY == 0 or validates:
            self._measure(validates)
        control.should_save = self._plan.due_in_epoch(step)
        if self._values and not control.should_save:
            self._report()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Validate, and save if a save is due."""
        self._measure(True)
        control.should_save = self._plan.due_at_epochs_end(state.global_step, last=state.global_step >= state.max_steps)
        if not control.should_save:
            self._report()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Report the folder that the Trainer has written, on the first rank; the others' is deleted."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        for pattern in _NOT_KEPT:
            for file in folder.glob(pattern):
                file.unlink()
        if not self._values:
            self._measure(False)
        for name in self._outside.changed():
            self._session.add_caveat(f"{name} is in no state_dict")
        try:
            self._report(ray.train.Checkpoint.from_directory(folder) if self._group.is_first else None)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._plan.saved()

    def _measure(self, validates: bool) -> None:
        loss = self._group.sum([self._trainer.last_loss])[0] / self._group.world_size
        rate = self._trainer.lr_scheduler.get_last_lr()[0]
        self._values = {"train/loss": loss, "train/learning_rate": float(rate)}
        if not validates:
            return
        model = self._trainer.model
        model.eval()
        with keeping_rng(self._group.device), self._trainer.compute_loss_context_manager():
            self._values |= self._validate()
        model.train()

    def _report(self, checkpoint: ray.train.Checkpoint | None = None) -> None:
        values, self._values = self._values, {}
        self._session.report(values, checkpoint)
