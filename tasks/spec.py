"""What is a whole pipeline file? The sections of all components put together, and the rules that hold between them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator, model_validator

from penstock.config import OnResume, Section, added_sections
from penstock.errors import SpecError
from penstock.ingest.formats.section import DataSection
from penstock.ingest.prepare import ANYWHERE, PrepareSpec
from penstock.ingest.preprocess.transform_spec import TransformSpec
from penstock.ingest.spec import MaterializeSpec, ShuffleSpec, SplitRule
from penstock.plugins import Plugins, is_there, optional
from penstock.storage import root_problem
from penstock.stores import StoreAddress, StoreSpec
from penstock.training.frameworks.registry import FRAMEWORKS, RECIPE_OPTIONAL
from penstock.training.registry.registry import REGISTRIES
from penstock.training.spec import EvaluateSpec, RegisterSpec, TrackingSpec, TrainSpec, mode_problem, split_names
from penstock.training.tracking.registry import TRACKERS
from penstock.usercode.files import CodeSpec

__all__ = ["NAMED", "STATE_FOLDER", "PipelineSpec", "cross_check"]

STATE_FOLDER = ".penstock"
"""Beside the pipeline file: what embedded servers keep, whatever the storage is, and the storage unless another is named."""

_TUNE: Any = optional("penstock.tasks.tune.spec:TuneSpec")
_RETENTION: Any = optional("penstock.tasks.retention.spec:RetentionSpec")
"""Sections of plug-ins; without the plug-in the key is unknown."""


class PipelineSpec(Section):
    """One pipeline: from rows in storage to a registered model."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
    """Name of the pipeline: lower-case letters, digits, `-` and `_`. Runs, the experiment and the model carry it."""
    storage: str = STATE_FOLDER
    """Where state, cached data and checkpoints live: a directory beside the pipeline file, or a URL such as s3://bucket/prefix."""
    stores: Annotated[dict[StoreAddress, StoreSpec], OnResume.FREE] = Field(default_factory=dict)
    """`s3://bucket`, or `s3://bucket/prefix`, to how it is reached, for data and for `storage`. Of other buckets the
    environment decides: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and so on."""
    data: DataSection
    """Where the rows are."""
    code: CodeSpec = CodeSpec()
    """What user code depends on that reading it does not show."""
    preprocess: list[TransformSpec] = Field(default_factory=list)
    """Transforms applied to every row, in order; those that learn something learn it from the train split only."""
    prepare: Annotated[PrepareSpec, OnResume.FREE] = ANYWHERE
    """Where the tasks run that read and prepare rows: on nodes without GPUs, for example. In the key of no stage."""
    materialize: MaterializeSpec = MaterializeSpec()
    """How prepared rows are kept."""
    shuffle: ShuffleSpec = ShuffleSpec()
    """The order of rows in training."""
    train: TrainSpec
    """What is trained."""
    evaluate: Annotated[EvaluateSpec, OnResume.FREE] = EvaluateSpec()
    """What is measured on held-out rows."""
    register_: Annotated[RegisterSpec, OnResume.FREE, Field(alias="register")] = RegisterSpec()
    """Under which name the model is registered."""
    tracking: Annotated[TrackingSpec, OnResume.FREE] = TrackingSpec()
    """Where runs are looked at and models are registered."""
    if TYPE_CHECKING:
        tune: Any = None
        retention: Any = None
    else:
        if _TUNE is not None:
            tune: Annotated[_TUNE | None, OnResume.FREE] = None
            """Which other values `penstock tune` tries (docs/tune.md)."""
        if _RETENTION is not None:
            retention: Annotated[_RETENTION | None, OnResume.FREE] = None
            """Which runs keep their data when a run is done; without it all do, until `penstock clean` (docs/retention.md)."""

    @property
    def preparing(self) -> PrepareSpec:
        """Where tasks run that apply transforms: `prepare`, and the GPUs that these ask for."""
        return self.prepare.with_gpus(max((entry.transform.num_gpus for entry in self.preprocess), default=0.0))

    @property
    def overlaps(self) -> bool:
        """Whether training begins while rows are prepared, which `materialize.overlap: auto` leaves to the other sections."""
        wanted = self.materialize.overlap
        if wanted != "auto":
            return wanted
        transforms = [entry.transform for entry in self.preprocess]
        known = all(each.function is None for each in transforms) and all(entry.origin is None for entry in self.preprocess)
        counted_classes = self.data.label is None or any(
            each.names_classes and self.data.label in each.named(self.data.label) for each in transforms
        )
        return known and counted_classes and not _overlap_problems(self)

    @model_validator(mode="before")
    @classmethod
    def _function_gets_any_column(cls, given: Any) -> Any:
        """Set `data.any_type` for a function of the user's."""
        data, train = (given.get("data"), given.get("train")) if isinstance(given, dict) else (None, None)
        if isinstance(data, dict) and isinstance(train, dict) and train.get("loop") is not None:
            return {**given, "data": {"any_type": True, **data}}
        return given

    @field_validator("storage")
    @classmethod
    def _may_keep_files(cls, storage: str) -> str:
        if problem := root_problem(storage):
            raise ValueError(problem)
        return storage


NAMED: dict[str, Plugins[Any]] = {"train.framework": FRAMEWORKS, "tracking.tracker": TRACKERS, "tracking.registry": REGISTRIES}
"""Fields that name something that packages add, by dotted path."""


def cross_check(spec: PipelineSpec) -> list[tuple[str, str]]:
    """Return (path, message) for every rule between fields that `spec` breaks."""
    problems = [(path, unknown) for path, names in NAMED.items() if (unknown := _unknown(spec, path, names))]
    train = spec.train
    if train.recipe is None and train.framework not in RECIPE_OPTIONAL:
        problems.append(("train.recipe", f"missing: {train.framework} trains the class that it names; write file.py:Name"))
    if train.loop is None and train.batch_rows % train.workers:
        lower = train.batch_rows // train.workers * train.workers
        options = " or ".join(str(n) for n in (lower, lower + train.workers) if n)
        problems.append(("train.batch_rows", f"{train.batch_rows} does not divide over {train.workers} workers; use {options}"))
    elif (train.batch_rows // train.workers) % train.accumulate:
        share = train.batch_rows // train.workers
        problems.append(("train.accumulate", f"{train.accumulate} does not divide a worker's {share} rows of a step"))
    fractions = sum(rule.fraction or 0.0 for rule in (spec.data.validation, spec.data.test) if isinstance(rule, SplitRule))
    if fractions >= 1:
        problems.append(
            ("data.validation.fraction", f"validation and test together take {fractions:g} of the rows; leave some to train")
        )
    if spec.data.columns is not None and spec.data.label is not None and spec.data.label not in spec.data.columns:
        advice = "add it, or take data.columns out if a transform makes it"
        problems.append(("data.columns", f"the label {spec.data.label!r} is not among the columns read; {advice}"))
    if spec.data.any_type and train.loop is None:
        problems.append(
            ("data.any_type", f"only a function (train.loop) takes columns that are not numbers, not {train.framework}")
        )
    if spec.data.datasets and train.loop is None:
        problems.append(("data.datasets", f"only a function (train.loop) asks for further ones, {train.framework} does not"))
    problems += [
        (f"train.datasets.{name}", f"it is not a dataset; write which split it is, {name}: test, or take one of {known}")
        for name in train.own_datasets
        if name not in (known := [*split_names(train.datasets), *spec.data.datasets])
    ]
    best = train.checkpoint.best
    if best is not None and train.loop is None:  # a loop reports names of its own
        if spec.data.validation is None:
            problems.append(("train.checkpoint.best", f"{best.metric!r} needs a validation split; set data.validation"))
        if not best.metric.startswith("val/"):
            problems.append(
                ("train.checkpoint.best.metric", f"{best.metric!r} is not a validation metric; the name starts with val/")
            )
    if best is not None and (problem := mode_problem(best.metric, best.mode)):
        problems.append(("train.checkpoint.best.mode", problem))
    if spec.evaluate.slices and spec.materialize.cache != "disk":
        problems.append(("evaluate.slices", "only rows on disk know which row of the source they are; use cache: disk"))
    if spec.preparing.gpus and spec.materialize.cache != "disk":
        problems.append(("materialize.cache", "rows that a GPU prepares (num_gpus) are kept on disk; use cache: disk"))
    problems += _promotion_problems(spec)
    problems += [problem for section in added_sections(spec) for problem in section.problems(spec)]
    if spec.materialize.cache == "none" and spec.shuffle.mode == "global":
        problems.append(
            ("shuffle.mode", "a stream (materialize.cache: none) has no random access; use mode: windowed, or cache: disk")
        )
    if train.last_batch != "keep" and spec.materialize.cache == "none":
        problems.append(("train.last_batch", f"a stream cannot {train.last_batch} its last step; use keep, or cache: disk"))
    if train.last_batch != "keep" and spec.shuffle.by_length is not None:
        problems.append(("train.last_batch", f"steps by length (shuffle.by_length) have no last one to {train.last_batch}"))
    problems += _variable_problems(spec)
    if spec.materialize.overlap is True:
        problems += [(path, f"{why} (materialize.overlap: true)") for path, why in _overlap_problems(spec)]
    if spec.materialize.cache == "memory" and spec.shuffle.lanes not in ("auto", 1):
        problems.append(("shuffle.lanes", "rows in memory are not dealt to lanes; leave lanes out, or use cache: disk"))
    at_once, streams = spec.prepare.concurrency, 2 * (train.workers + 1)  # to train and to validate, and of shared units
    lanes = spec.materialize.cache == "none" and train.workers > 1 and spec.shuffle.most_lanes(train.lane_batch_rows) > 1
    if lanes and at_once is not None and at_once < streams:
        problems.append(
            (
                "prepare.concurrency",
                f"{train.workers} workers, which prepare lanes of their own, run up to {streams} tasks at once; "
                f"use {streams} or more, or shuffle.lanes: 1",
            )
        )
    if spec.materialize.cache != "disk" and spec.shuffle.window_of == "shards":
        problems.append(("shuffle.window_of", "only rows on disk lie in shards; use window_of: rows, or cache: disk"))
    elif spec.shuffle.mode != "windowed" and spec.shuffle.window_of == "shards":
        problems.append(("shuffle.window_of", f"mode: {spec.shuffle.mode} has no windows; set mode: windowed, or leave it out"))
    return problems


def _overlap_problems(spec: PipelineSpec) -> list[tuple[str, str]]:
    """Rules about what must be known of rows that are prepared while training runs."""
    data, shuffle, train = spec.data, spec.shuffle, spec.train
    rules = [name for name in ("validation", "test") if isinstance(getattr(data, name), SplitRule)]
    changing = [(number, entry) for number, entry in enumerate(spec.preprocess) if not entry.transform.keeps_rows]
    found = [
        (spec.materialize.cache != "disk", "materialize.cache", "only shards on disk are read while others are made; use disk"),
        (data.invalid != "error", "data.invalid", "rows that are left out are not counted beforehand; use error"),
        *(
            (True, f"data.{name}", "how many rows a rule takes is not known beforehand; give it its own files")
            for name in rules
        ),
        *(
            (True, f"preprocess.{number}.{entry.kind}", "how many rows it makes is not known beforehand; filter the source")
            for number, entry in changing
        ),
        (shuffle.mode == "global", "shuffle.mode", "the first steps have rows of all shards; use windowed, or none"),
        (shuffle.by_length is not None, "shuffle.by_length", "it needs the lengths of rows beforehand; leave it out"),
        (
            spec.preparing.gpus > 0,
            "preprocess",
            "tasks that prepare on GPUs would wait for those of training; leave num_gpus out",
        ),
        (train.framework != "torch", "train.framework", "only a recipe in torch reads rows as they are prepared"),
    ]
    return [(path, why) for holds, path, why in found if holds]


def _unknown(spec: PipelineSpec, path: str, names: Plugins[Any]) -> str | None:
    name = functools.reduce(getattr, path.split("."), spec)
    try:
        names.origin(str(name))  # which imports nothing
    except KeyError:
        try:
            names.get(str(name))
        except SpecError as error:
            return error.message
    return None


def _promotion_problems(spec: PipelineSpec) -> list[tuple[str, str]]:
    """Rules about what moves the alias."""
    promote = spec.register_.promote
    if promote is None:
        return []
    problems = []
    if not is_there("penstock.tasks.promote.decide:decide"):
        problems.append(("register.promote", "it needs the plug-in penstock.tasks.promote, which was deleted here"))
    split = "validation" if promote.metric.startswith("val/") else "test"
    if promote.is_reported:
        if spec.train.loop is None:
            problems.append(
                (
                    "register.promote.metric",
                    f"{promote.metric!r} is not test/NAME or val/NAME, and only a function (train.loop) reports other names",
                )
            )
    elif promote.metric.endswith("/loss"):
        problems.append(
            (
                "register.promote.metric",
                f"{promote.metric!r} is a loss, which is the recipe's own; name a metric such as test/f1",
            )
        )
    if not promote.is_reported and getattr(spec.data, split) is None:
        problems.append(("register.promote.metric", f"{promote.metric!r} needs a {split} split; set data.{split}"))
    if spec.register_.alias is None:
        problems.append(("register.promote", "no alias is set that could move; set register.alias"))
    if promote.floors and not spec.evaluate.slices:
        problems.append(("register.promote.floors", "they are of slices; name the columns in evaluate.slices"))
    columns = [each if isinstance(each, str) else next(iter(each)) for each in spec.evaluate.slices]
    problems += [
        ("register.promote.floors", f"{key!r} is not one of evaluate.slices ({', '.join(columns)}), nor a slice of it")
        for key in promote.floors
        if columns and not any(column in key for column in columns)
    ]
    name, measured = promote.metric.rpartition("/")[2], spec.evaluate.metrics
    if promote.floors and measured is not None and name not in measured:
        problems.append(("register.promote.floors", f"they need {promote.metric} of slices; add {name} to evaluate.metrics"))
    return problems


def _variable_problems(spec: PipelineSpec) -> list[tuple[str, str]]:
    """Rules about rows that differ in length, and images that stay encoded."""
    problems: list[tuple[str, str]] = []
    transforms = [entry.transform for entry in spec.preprocess]
    kept = [number for number, each in enumerate(transforms) if each.makes_lists or each.keeps_images_encoded]
    problems += [
        (f"preprocess.{number}.{each.name}", f"it would undo {transforms[kept[0]].name} (entry {kept[0]}); put it before that")
        for number, each in enumerate(transforms)
        if each.function is not None and kept and number > kept[0]
    ]
    lists = any(each.makes_lists for each in transforms)
    if spec.train.compile and lists:
        problems.append(("train.compile", "lists have another shape in every step, and each one another kernel; leave it out"))
    if spec.shuffle.by_length is not None and not lists:
        problems.append(("shuffle.by_length", "there are no lists to go by; the transform `ragged` makes them"))
    return problems
