"""How does Lightning's Trainer run on penstock's rows and in its ranks, and when does it save?

The Trainer's own checkpoint holds its loops, the optimizers, schedulers and callbacks; it is read with `weights_only`, so
nothing is unpickled. The place in the rows and the random generators are the session's (training/session/session.py).
"""

from __future__ import annotations

import importlib
import math
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import ray.train
import safetensors.torch
import torch
from torch import Tensor

from penstock.training.checkpoint.matching import load_matching, start_weights
from penstock.training.faults import IN_THE_MODEL, not_a_number
from penstock.training.frameworks.lightning.library import lightning_of, make_module, refuse_averages
from penstock.training.frameworks.lightning.loading import STATE, TRAINER, WEIGHTS, kept_state, steps_of
from penstock.training.frameworks.loops.steps import REPORT_EVERY, SavePlan, as_rank, train_epochs, validation_epochs
from penstock.training.frameworks.torch.one_batch import refusing_broadcasts
from penstock.training.job import TrainJob
from penstock.training.own_values import OwnValues, collecting
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.session.session import Session
from penstock.training.step.unsaved import Unsaved, unsaved_state

__all__ = ["PRECISION", "fit"]

PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def fit(job: TrainJob, group: Group, session: Session) -> None:
    """Train one rank's module to the end of the spec.

    Raises:
        SpecError: an epoch's last step has fewer rows than there are workers, or its steps cannot be counted.
        StopAtCheckpoint: the driver has asked for a stop, and this state is saved.
    """
    spec = job.spec
    module = make_module(job.code, spec.params)
    pl = lightning_of(type(module))
    ranks: dict[str, Any] = {}
    if group.world_size > 1:
        launched = importlib.import_module(f"{pl.__name__}.plugins.environments").TorchElasticEnvironment()
        ranks = {
            "strategy": pl.strategies.DDPStrategy(cluster_environment=launched),
            "num_nodes": group.world_size,  # each rank is its own node of one device, wherever it runs
        }
    on_gpu = group.device.type == "cuda"
    newest = session.get_checkpoint()
    as_node = as_rank(group, LOCAL_RANK="0", GROUP_RANK=str(group.rank))
    with tempfile.TemporaryDirectory(prefix="penstock-lightning-") as folder, as_node:
        trainer = pl.Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            devices=[group.device.index or 0] if on_gpu else 1,
            max_epochs=spec.epochs,
            max_steps=spec.max_steps or -1,
            precision=PRECISION[spec.precision],
            gradient_clip_val=spec.clip_norm,
            callbacks=[_saving(pl, job, group, session)],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            **ranks,
        )
        user_code = Recipe(module, job.code.target).reraise_as_user_error("training")
        with refusing_broadcasts(job.code.target), user_code:
            trainer.fit(
                module,
                train_epochs(job, group, session),
                validation_epochs(job, group, session),
                ckpt_path=Path(newest.path) / TRAINER if newest is not None else None,
                weights_only=True,
            )


def _saving(pl: Any, job: TrainJob, group: Group, session: Session) -> Any:
    spec = job.spec

    class Saving(pl.callbacks.Checkpoint):  # type: ignore[misc]  # the Trainer calls callbacks of this kind last
        """Reports metrics, and saves as `train.checkpoint` sets; at an epoch's end after its validation."""

        def __init__(self) -> None:
            self._plan = SavePlan(job, group, session)
            self._of_validation: set[str] = set()
            self._logged: dict[str, float] = {}
            """Values of penstock.log in the last validation."""
            self._step = -1
            self._in_part = session.state.position > 0
            """Whether only a part of the epoch is trained here, as it continues in its middle."""
            self._of_part: set[str] = set()
            """Names of means over that part."""

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            if spec.start_from is not None and session.get_checkpoint() is None:  # the module has its layers by now
                print(load_matching(module, start_weights(job.run_storage), spec.start_from))

        def on_train_start(self, trainer: Any, module: Any) -> None:
            refuse_averages(trainer.callbacks)
            for callback in trainer.callbacks:
                if "BaseFinetuning" in {base.__name__ for base in type(callback).__mro__}:
                    session.add_caveat(f"{type(callback).__name__} freezes again the layers that it has thawed")
            others = {type(each).__name__: each for each in trainer.callbacks if each is not self and not each.state_dict()}
            others |= {
                "recipe": type(module),
                **{f"optimizer {number}": each for number, each in enumerate(trainer.optimizers)},
            }
            self._outside = Unsaved(partial(unsaved_state, module, others, frozenset(vars(pl.LightningModule()))))
            steps, newest = trainer.estimated_stepping_batches, session.get_checkpoint()
            if newest is not None and trainer.lr_scheduler_configs and (before := steps_of(Path(newest.path, STATE))) != steps:
                session.add_caveat(f"a schedule may depend on the number of steps: {before:,} before and {steps:,} now")

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if isinstance(loss, Tensor) and not math.isfinite(value := loss.detach().float().item()):
                raise not_a_number(f"the training loss is {value} at step {trainer.global_step:,}", IN_THE_MODEL)
            self._outside.after_step()
            if trainer.global_step == self._step:
                session.add_caveat("gradients that add up over several batches are in no checkpoint")
            self._step = trainer.global_step
            if trainer.is_last_batch or trainer.global_step == trainer.max_steps:
                return  # the epoch's end saves it
            if self._plan.due_in_epoch(trainer.global_step):
                self._report(trainer, module, save=True)
            elif trainer.global_step % REPORT_EVERY == 0:
                self._report(trainer, module, save=False)

        def on_validation_start(self, trainer: Any, module: Any) -> None:
            self._before = trainer.callback_metrics.keys() - self._of_validation
            self._collects = ExitStack()
            self._own = self._collects.enter_context(collecting(OwnValues(group, "val")))

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self._of_validation |= trainer.callback_metrics.keys() - self._before
            self._collects.close()
            self._logged = self._own.totals()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            last = trainer.should_stop or trainer.current_epoch + 1 >= spec.epochs or trainer.global_step == trainer.max_steps
            save = self._plan.due_at_epochs_end(trainer.global_step, last=last)
            progress = trainer.fit_loop.epoch_progress
            ended = int(trainer.is_last_batch)  # max_steps may end training inside an epoch, which then continues
            for counts in (progress.total, progress.current):
                counts.processed -= 1 - ended
            self._report(trainer, module, save=save, validated=True)
            for counts in (progress.total, progress.current):
                counts.processed += 1 - ended
            self._in_part = False

        def _report(self, trainer: Any, module: Any, *, save: bool, validated: bool = False) -> None:
            # Between validations the metrics of the last one are of older weights.
            stale = set() if validated else self._of_validation
            values = {name: float(value) for name, value in trainer.callback_metrics.items() if name not in stale}
            if validated:
                values = {**self._logged, **values}
                logged = [each.meta for each in trainer._results.values()] if self._in_part else []
                self._of_part = {name for meta in logged if meta.on_epoch for name in (meta.name, f"{meta.name}_epoch")}
            values = {name: value for name, value in values.items() if name not in self._of_part}
            if not save:
                session.report(values)
                return
            with tempfile.TemporaryDirectory(prefix="penstock-lightning-") as folder:
                trainer.save_checkpoint(Path(folder) / TRAINER)  # a collective; the first rank writes
                checkpoint = None
                if group.is_first:
                    values_by_name = module.state_dict()
                    weights = {name: _saved(value) for name, value in values_by_name.items() if isinstance(value, Tensor)}
                    extra = {name: value for name, value in values_by_name.items() if name not in weights}
                    safetensors.torch.save_file(weights, Path(folder) / WEIGHTS)
                    whole = torch.load(Path(folder) / TRAINER, map_location="cpu", mmap=True, weights_only=True)
                    hooks = [value for name, value in whole.items() if name not in ("epoch", "global_step")]
                    for name in self._outside.changed(hooks):
                        session.add_caveat(f"{name} is in no state_dict")
                    state = kept_state(whole, extra, trainer.estimated_stepping_batches)
                    Path(folder, STATE).write_bytes(state)
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                session.report(values, checkpoint)
            self._plan.saved()

    return Saving()


def _saved(value: Tensor) -> Tensor:
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)  # safetensors refuses shared memory
