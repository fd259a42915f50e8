"""Which keys of a pipeline file are about training, evaluation and registration?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from penstock.config import OnResume, Section
from penstock.ingest.schema import SPLITS, Split

__all__ = [
    "LOWER_IS_BETTER",
    "BackendSpec",
    "BestSpec",
    "CheckpointSpec",
    "EvaluateSpec",
    "RegisterSpec",
    "TrackingSpec",
    "TrainSpec",
    "mode_problem",
    "split_names",
]


def split_names(datasets: Mapping[str, str] | str) -> dict[str, Split]:
    """Return the split that each name of a dataset means, by `train.datasets`."""
    own = {} if isinstance(datasets, str) else {name: split for name in datasets for split in SPLITS if datasets[name] == split}
    return {**{split: split for split in SPLITS}, "valid": "validation", "val": "validation", **own}


LOWER_IS_BETTER = frozenset({"loss", "log_loss", "mae", "mse", "rmse", "calibration_error"})

HIGHER_IS_BETTER = frozenset(
    {"accuracy", "balanced_accuracy", "f1", "precision", "recall", "auroc", "average_precision", "mcc", "r2"}
)


def mode_problem(metric: str, mode: Literal["min", "max"]) -> str:
    """Explain why `mode` would keep the worst; empty if it does not, or if the metric is the user's own.

    Args:
        metric: as a validation names it: `val/accuracy`.
    """
    name = metric.rpartition("/")[2]
    if name in HIGHER_IS_BETTER and mode == "min":
        return f"{metric!r} is better the higher it is, and mode: min keeps the lowest; write mode: max"
    if name in LOWER_IS_BETTER and mode == "max":
        return f"{metric!r} is better the lower it is, and mode: max keeps the highest; write mode: min"
    return ""


class BestSpec(Section):
    """Which checkpoint is the best one."""

    metric: Annotated[str, OnResume.WARN] = "val/loss"
    """A validation metric, as MLflow shows it, or any that a `loop` reports with a checkpoint."""
    mode: Annotated[Literal["min", "max"], OnResume.WARN] = "min"
    """Whether lower or higher is better. The wrong mode for one of penstock's own metrics is an error."""


class CheckpointSpec(Section):
    """When training saves itself."""

    every_steps: Annotated[PositiveInt | None, OnResume.FREE] = None
    """Save every so many optimizer steps."""
    every_s: Annotated[PositiveFloat | None, OnResume.FREE] = 60.0
    """Save when so many seconds have passed since the last checkpoint."""
    every_epoch: Annotated[bool, OnResume.FREE] = True
    """Save at the end of each epoch, unless that is a round of boosting: `every_steps` counts rounds."""
    keep: Annotated[NonNegativeInt, OnResume.FREE] = 3
    """Newest checkpoints kept; at least two protect against a damaged newest one. 0 keeps one while training runs, and in the
    end only the model's (docs/resume.md)."""
    best: Annotated[BestSpec | None, OnResume.WARN] = None
    """Keep the best by a validation metric, of equals the latest, and register that one, not the last."""
    keep_best: Annotated[PositiveInt, OnResume.FREE] = 1
    """Best checkpoints kept by `best`, besides the newest."""

    @model_validator(mode="after")
    def _best_has_a_metric(self) -> CheckpointSpec:
        if self.keep_best > 1 and self.best is None:
            raise ValueError("`keep_best` needs the metric that it goes by: best: {metric: val/loss}")
        return self


class BackendSpec(Section):
    """How workers exchange gradients, as Ray Train's `TorchConfig` has it."""

    name: Annotated[Literal["gloo", "nccl"] | None, OnResume.WARN] = None
    """Library of the collectives. The default is `nccl` on GPUs, `gloo` on CPUs."""
    timeout_s: Annotated[PositiveInt, OnResume.FREE] = 900
    """Seconds that a worker waits in a collective for the others: one that is stuck in user code shows so."""
    init_method: Annotated[Literal["env", "tcp"], OnResume.FREE] = "env"
    """How the workers find each other: by environment variables, or by an address."""


class TrainSpec(Section):
    """What is trained, and on what."""

    framework: str = "torch"
    """The training framework: `torch`, `xgboost` or `lightgbm` (docs/boosted.md), `lightning` (docs/lightning.md),
    `transformers` (docs/transformers.md), `keras` (docs/keras.md), or the name that an installed package adds
    (docs/extend/framework.md)."""
    recipe: Annotated[str | None, OnResume.WARN] = None
    """`path/to/file.py:Name` or `package.module:Name`: the user's class (see docs/recipe.md). Boosted trees have none."""
    loop: Annotated[str | None, OnResume.WARN] = None
    """`path/to/file.py:train_func`, instead of `recipe`: a function written for Ray Train, with no edit (docs/ray-train.md)."""
    params: Annotated[dict[str, Any], OnResume.WARN] = Field(default_factory=dict)
    """Constructor arguments of the recipe; the parameters of boosted trees."""
    epochs: Annotated[PositiveInt, OnResume.FREE] = 1
    """Passes over the train split. A round of boosting is one."""
    max_steps: Annotated[PositiveInt | None, OnResume.FREE] = None
    """Stop after so many optimizer steps, whatever the epochs say."""
    batch_rows: PositiveInt = 256
    """Rows of one optimizer step over all workers; a multiple of their number."""
    last_batch: Literal["keep", "drop", "fill"] = "keep"
    """The last step of an epoch, where the rows do not fill it: `keep` learns a smaller one, `drop` leaves its rows out (where
    rows are shuffled, other ones in every epoch), `fill` adds the first rows of the epoch. Steps by
    length (`shuffle.by_length`) have no such step, and take `keep` only."""
    workers: Annotated[PositiveInt, OnResume.WARN] = 1
    """Ray Train workers (one alone on CPUs: a Ray task). Changing it between attempts keeps the order of rows, not the bits."""
    gpus: Annotated[Literal["auto"] | NonNegativeInt, OnResume.WARN] = "auto"
    """GPUs per worker; `auto` uses one per worker when the cluster has that many, else none, and says which."""
    cpus_per_worker: Annotated[PositiveFloat, OnResume.WARN] = 1.0
    """CPUs reserved per worker; also its number of torch threads."""
    resources: Annotated[dict[str, PositiveFloat], OnResume.FREE] = Field(default_factory=dict)
    """Further resources of a Ray cluster that each worker reserves, by Ray's names: `{memory: 8.0e+9, tape: 1}`, or
    `{"accelerator_type:A100": 0.001}` for nodes with that GPU."""
    placement: Annotated[Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"], OnResume.FREE] = "PACK"
    """Whether workers share nodes, or are spread over them; the strict ones wait until that is possible."""
    backend: BackendSpec = BackendSpec()
    """How workers exchange gradients."""
    precision: Annotated[Literal["fp32", "bf16", "fp16"], OnResume.WARN] = "fp32"
    """Arithmetic of the forward pass (autocast); fp16 adds a gradient scaler."""
    compile: Annotated[bool, OnResume.WARN] = False
    """Run the model through torch.compile. Not with `ragged`, whose batches have another shape each time."""
    accumulate: PositiveInt = 1
    """Micro-batches each worker's share of a step is split into, to save memory; its rows must divide into so many."""
    clip_norm: Annotated[PositiveFloat | None, OnResume.WARN] = None
    """Clip the gradients' global norm to this value."""
    learning_rate: Annotated[PositiveFloat, OnResume.WARN] = 1e-3
    """Learning rate of the default optimizer (AdamW). Refused beside a recipe's own `optimizer`, which would not read it."""
    validate_every_steps: Annotated[PositiveInt | None, OnResume.FREE] = None
    """Validate also every so many steps; the end of each epoch always does."""
    start_from: str | None = None
    """Weights to begin with: a file (`base.safetensors`, `.pt`) beside the pipeline file, `run:<run>`, or a registered model,
    `models:/name@alias` or `models:/name/3`. Those that fit by name and shape are taken, and a line says which are new or left.
    Boosted trees grow on. For `loop` any file or folder: `ray.train.get_checkpoint()` gives it at the beginning. The content is
    part of the key."""
    datasets: dict[str, Literal["split", "whole", "train", "validation", "test"]] | str = Field(default_factory=dict)
    """For `loop`: whether `get_dataset_shard` splits a dataset over the workers (`split`, the default) or gives each all of it
    (`whole`). A name of your own is one of a split: `{holdout: test}`; `valid` and `val` are names of validation. Or
    `file.py:Name` of a `ray.train.DataConfig`."""
    report: Annotated[dict[str, Literal["mean", "sum", "min", "max"]], OnResume.WARN] = Field(default_factory=dict)
    """For `loop`: names whose value is made of all workers' values, as in `{accuracy: mean}`. Other names have worker 0's."""
    callbacks: Annotated[list[str | dict[str, dict[str, Any]]], OnResume.WARN] = Field(default_factory=list)
    """What else happens while training runs: `early_stopping`, `ema`, or `file.py:Name`; with options as
    `early_stopping: {patience: 3}` (docs/callbacks.md)."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """When training saves itself."""
    retries: Annotated[NonNegativeInt, OnResume.FREE] = 3
    """Restarts of the worker group within one attempt."""
    wait_s: Annotated[PositiveFloat, OnResume.FREE] = 900.0
    """Seconds that a start or a restart of the workers waits for CPUs and GPUs that the cluster lacks, such as for a lost node
    to come back. Then the command ends, and the same command continues."""
    stall_s: Annotated[PositiveFloat, OnResume.FREE] = 120.0
    """Seconds without a step until a line says at which line of Python every rank is; one that was stopped is started again."""

    @model_validator(mode="before")
    @classmethod
    def _loop_is_trained(cls, given: Any) -> Any:
        """Set framework and recipe of a loop."""
        if isinstance(given, dict) and given.get("framework") == "horovod":
            raise ValueError(
                "Horovod is gone from Ray; a recipe's gradients are averaged by torch's DistributedDataParallel (DDP): "
                "take `framework` out"
            )
        if not isinstance(given, dict) or given.get("loop") is None:
            return given
        if given.get("recipe") not in (None, given["loop"]):
            raise ValueError("`loop` and `recipe` exclude each other; take one")
        if given.get("framework", "ray_train") != "ray_train":
            raise ValueError("`loop` is trained by the framework ray_train; take `framework` out")
        return {**given, "recipe": given["loop"], "framework": "ray_train"}

    @model_validator(mode="after")
    def _datasets_are_a_loops(self) -> TrainSpec:
        if self.report and self.framework != "ray_train":
            raise ValueError(f"`report` is for `loop`; {self.framework} has one value for all workers: take it out")
        if self.datasets and self.framework != "ray_train":
            raise ValueError(f"`datasets` is for `loop`; {self.framework} cuts every split over the workers: take it out")
        for name, how in self.own_datasets.items():
            if how in SPLITS and name in SPLITS and how != name:
                raise ValueError(f"datasets: {name} is a split itself, not {how}")
        return self

    @property
    def own_datasets(self) -> Mapping[str, str]:
        """`datasets`, unless it names code."""
        return self.datasets if isinstance(self.datasets, dict) else {}

    @field_validator("resources")
    @classmethod
    def _are_further_resources(cls, resources: dict[str, float]) -> dict[str, float]:
        if {"CPU", "GPU"} & resources.keys():
            raise ValueError("CPU and GPU are train.cpus_per_worker and train.gpus")
        return resources

    @field_validator("callbacks")
    @classmethod
    def _one_name_each(cls, callbacks: list[str | dict[str, dict[str, Any]]]) -> list[str | dict[str, dict[str, Any]]]:
        if any(isinstance(each, dict) and len(each) != 1 for each in callbacks):
            raise ValueError("an entry is a name, or one name with its options: `- early_stopping: {patience: 3}`")
        return callbacks

    def set_by_user(self, fields: Iterable[str]) -> list[str]:
        """Return those of `fields` that the user has set, also to the default."""
        return [name for name in fields if name in self.model_fields_set]

    @property
    def lane_batch_rows(self) -> int:
        """Rows that `lanes: auto` divides: of a step, or 1, as a function chooses the rows of its batches when it runs."""
        return self.batch_rows if self.loop is None else 1

    @property
    def named_callbacks(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and options of each callback, in order."""
        return [(each, {}) if isinstance(each, str) else next(iter(each.items())) for each in self.callbacks]


class TrackingSpec(Section):
    """Tracker and model registry: MLflow, or those that an installed package adds."""

    tracker: Annotated[str, OnResume.FREE] = "mlflow"
    """Tracker of metrics, checkpoints and documents of a run: `mlflow`, or an added one (docs/extend/tracker.md)."""
    registry: Annotated[str, OnResume.FREE] = "mlflow"
    """Registry of the model: `mlflow`, or an added one (docs/extend/registry.md)."""


Edges = Annotated[list[float], Field(min_length=1)]


class EvaluateSpec(Section):
    """What is measured on held-out rows."""

    metrics: Annotated[list[str] | None, OnResume.FREE] = None
    """Names (docs/recipe.md lists them), instead of the recipe's `metrics()`, or accuracy and f1, or mae, rmse and r2."""
    slices: Annotated[list[str | dict[str, Edges]], OnResume.FREE] = Field(default_factory=list)
    """Columns of the source: each value is measured by itself, or of `{age: [18, 30]}` each range between the edges."""

    @field_validator("slices")
    @classmethod
    def _are_slices(cls, slices: list[str | dict[str, list[float]]]) -> list[str | dict[str, list[float]]]:
        for each in slices:
            if isinstance(each, dict) and len(each) != 1:
                raise ValueError("write one column an entry, as in [country, {age: [18, 30, 60]}]")
            if isinstance(each, dict) and any(edges != sorted(set(edges)) for edges in each.values()):
                raise ValueError("the edges of a column must increase")
        return slices


class PromoteSpec(Section):
    """When the alias moves: if the new model is better than the one that holds it, measured now on the same held-out rows."""

    metric: Annotated[str, OnResume.FREE]
    """What is compared, as in `test/accuracy`: `test` or `val`, and a metric of docs/recipe.md, but no loss and none of the
    recipe's. Or a name that a `loop` reports with its checkpoints, such as `accuracy`."""
    mode: Annotated[Literal["min", "max"] | None, OnResume.FREE] = None
    """Whether lower or higher is better, of a reported name that is not one of penstock's."""
    min_gain: Annotated[float, OnResume.FREE, Field(ge=0)] = 0.0
    """The least gain, in the metric's unit. At 0 any gain will do, and an equal model does not move the alias."""
    floors: Annotated[dict[str, float], OnResume.FREE] = Field(default_factory=dict)
    """Slice (`country=France`), or a column of `evaluate.slices` for each of its slices: the metric's worst value there."""
    otherwise: Annotated[Literal["keep", "move"], OnResume.FREE] = "keep"
    """What the alias does where the two cannot be compared, such as when a column that the old model needs is gone."""

    @model_validator(mode="after")
    def _has_a_direction(self) -> PromoteSpec:
        name = self.metric.rpartition("/")[2]
        if not self.is_reported and self.mode is not None:
            raise ValueError(f"mode is for a reported name; which {self.metric} is better is known: take it out")
        if self.is_reported and self.floors:
            raise ValueError(f"floors are of measured metrics, such as test/accuracy, and {self.metric!r} is a reported name")
        if self.is_reported and self.mode is None and name not in HIGHER_IS_BETTER | LOWER_IS_BETTER:
            raise ValueError(f"mode is missing: whether {self.metric!r} is better lower (min) or higher (max)")
        if self.mode is not None and (problem := mode_problem(self.metric, self.mode)):
            raise ValueError(problem)
        return self

    @property
    def is_reported(self) -> bool:
        """Whether the metric is a name that a function reports, not one that both models are measured by."""
        return re.fullmatch(r"(test|val)/\w+", self.metric) is None

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller value is a better one."""
        return self.mode == "min" or (self.mode is None and self.metric.rpartition("/")[2] in LOWER_IS_BETTER)


class RegisterSpec(Section):
    """Under which name the model is registered."""

    name: Annotated[str | None, OnResume.FREE] = None
    """Registered model name, instead of the pipeline's name."""
    alias: Annotated[str | None, OnResume.FREE] = "candidate"
    """Alias set on the new version: letters, digits, `_` and `-`. The version that held it before gets `candidate-previous`."""
    promote: PromoteSpec | None = None
    """When the alias moves (docs/promote.md). Without it the newest version gets the alias."""

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and (not name.strip() or any(sign in name for sign in "/:.%\"'")):
            raise ValueError("a model's name in MLflow is not empty and has no / : . % or quotation mark")
        return name

    @field_validator("alias")
    @classmethod
    def _is_an_alias(cls, alias: str | None) -> str | None:
        if alias is not None and not re.fullmatch(r"[\w-]{1,246}", alias):
            raise ValueError("an alias is letters, digits, _ and -, 246 at most; null sets none")
        if alias is not None and re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE):
            raise ValueError("`latest` and `v1`, `v2`, ... are reserved by MLflow")
        if alias is not None and alias.endswith("-previous"):
            raise ValueError("`-previous` is kept for the version that held an alias before")
        return alias
