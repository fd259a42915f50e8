"""Which of `train.params` are TrainingArguments of the Trainer, and which are arguments of the user's own code?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from penstock.errors import SpecError
from penstock.messages import did_you_mean

__all__ = ["TRAINERS", "split_params"]

TRAINERS = frozenset(
    {
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "max_grad_norm"),
        *("adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args", "optim_target_modules"),
        *("label_smoothing_factor", "neftune_noise_alpha", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("average_tokens_across_devices", "ddp_find_unused_parameters"),
    }
)
"""TrainingArguments that `train.params` may have."""

_ELSEWHERE = {
    "num_train_epochs": "train.epochs",
    "max_steps": "train.max_steps",
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), "train.batch_rows, of all workers"),
    **dict.fromkeys(("seed", "data_seed"), "shuffle.seed"),
    **dict.fromkeys(("bf16", "fp16"), "train.precision"),
    **dict.fromkeys(("save_strategy", "save_steps", "save_total_limit", "load_best_model_at_end"), "train.checkpoint"),
    "metric_for_best_model": "train.checkpoint.best",
    **dict.fromkeys(("eval_strategy", "eval_steps"), "train.validate_every_steps; the end of each epoch validates"),
    "gradient_accumulation_steps": "train.batch_rows",
    "use_cpu": "train.gpus",
}
"""TrainingArgument -> the key of the pipeline file that replaces it."""


def split_params(build: Callable[..., Any], params: Mapping[str, Any], *, after: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort the params by name.

    Args:
        build: the user's function or class.
        after: number of its first arguments that are not from `params`.

    Returns:
        (arguments of `build`, TrainingArguments).

    Raises:
        SpecError: some names are unknown to both, or arguments of both.
    """
    from transformers import TrainingArguments

    taken = list(inspect.signature(build).parameters.values())[after:]
    all_others = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken)
    own = {one.name for one in taken if one.kind is not inspect.Parameter.VAR_KEYWORD}
    decided = {field.name for field in fields(TrainingArguments)} - TRAINERS
    name = getattr(build, "__name__", str(build))
    problems = []
    for param in params:
        if param in own & TRAINERS:
            problems.append(f"train.params.{param} is an argument of {name} and of TrainingArguments; rename that of {name}")
        elif param in own | TRAINERS:
            continue
        elif param in decided:
            word = _ELSEWHERE.get(param)
            problems.append(f"train.params.{param} is set by the pipeline: {f'use {word}' if word else 'it cannot be changed'}")
        elif not all_others:
            hint = did_you_mean(param, own | TRAINERS)
            problems.append(f"train.params.{param} is not an argument of {name} or TrainingArguments{hint}")
    if problems:
        raise SpecError("train does not fit transformers", problems=problems, next_step="see docs/transformers.md")
    trainers = {param: value for param, value in params.items() if param in TRAINERS - own}
    return {param: value for param, value in params.items() if param not in trainers}, trainers
