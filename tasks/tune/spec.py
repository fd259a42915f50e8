"""What may a pipeline file say about a sweep?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from penstock.config import OnResume, PluginSection, Section
from penstock.errors import SpecError
from penstock.messages import did_you_mean
from penstock.training.spec import mode_problem

__all__ = ["Dimension", "TuneSpec"]

_FIXED = (
    *("name", "storage", "tracking", "tune", "register", "evaluate"),
    *("train.workers", "train.cpus_per_worker", "train.gpus", "train.resources"),
)
"""Keys that change no training, or what a trial belongs to, and what every trial takes of the cluster."""


class Dimension(Section):
    """The values that one key may take: exactly one of these."""

    choice: Annotated[list[Any] | None, Field(min_length=1)] = None
    """One of these values; with `searcher: grid` every one, combined with those of the other keys."""
    range: tuple[int | float, int | float] | None = None
    """A number between two, both included; a whole number where both are."""
    log_range: tuple[int | float, int | float] | None = None
    """The same, but each order of magnitude is as likely as the next."""

    @model_validator(mode="after")
    def _is_one(self) -> Dimension:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of choice, range and log_range; this has {' and '.join(given) or 'none'}")
        low, high = self.range or self.log_range or (1, 2)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"{low:g} is not below {high:g}")
        if self.log_range is not None and low <= 0:
            raise ValueError(f"a log_range begins above 0, not at {low:g}")
        return self

    @property
    def extremes(self) -> list[Any]:
        """Every listed value, or both ends: if these fit the file, all others do."""
        return list(self.choice or self.range or self.log_range or ())

    @property
    def is_whole(self) -> bool:
        """Whether a range is one of whole numbers."""
        return all(isinstance(end, int) for end in self.range or self.log_range or (0.0,))


class TuneSpec(PluginSection):
    """A sweep: trials of this pipeline with other values of some keys. `penstock tune FILE` makes it; `run` ignores it."""

    space: Annotated[dict[str, Dimension], OnResume.FREE, Field(min_length=1)]
    """Key of this file, dotted as `--set` takes it, such as `train.params.hidden` -> the values it may take."""
    metric: Annotated[str, OnResume.FREE] = "val/loss"
    """What trials are compared by: a validation metric, as MLflow shows it, or any that a `loop` reports. The test split is for
    the best trial alone."""
    mode: Annotated[Literal["min", "max"], OnResume.FREE] = "min"
    """Whether lower or higher is better. One of penstock's own metrics beside the wrong one is an error."""
    trials: Annotated[PositiveInt | None, OnResume.FREE] = None
    """How many trials; 10 if not given, for `searcher: grid` all. Raise it, and the sweep goes on."""
    time_s: Annotated[PositiveFloat | None, OnResume.FREE] = None
    """Seconds of one `penstock tune` command after which no further trial begins; those that run come to their end."""
    searcher: Annotated[Literal["random", "grid", "tpe"], OnResume.FREE] = "random"
    """Which values are tried next: drawn at random, all combinations, or those that Optuna's TPE sampler proposes after the
    finished trials."""
    scheduler: Annotated[Literal["none", "asha", "median"], OnResume.FREE] = "none"
    """Which trials end early: none, those outside the best of their rung (`asha`, Optuna's SuccessiveHalvingPruner), or those
    whose best value is worse than the median of the trials that are done (`median`, its MedianPruner)."""
    grace: Annotated[PositiveInt, OnResume.FREE] = 1
    """Validations that every trial gets before it may be ended early; the first rung of `asha`."""
    reduction: Annotated[int, OnResume.FREE, Field(ge=2)] = 3
    """`asha`: one in so many goes on from a rung, and the next rung is at so many times the validations."""
    concurrent: Annotated[PositiveInt | None, OnResume.FREE] = None
    """Trials at once; as many as the CPUs and GPUs hold if not given. Lowered, with a line, where they do not fit."""
    seed: Annotated[int, OnResume.FREE, Field(ge=0)] = 0
    """Of the search. The training's own seed is `shuffle.seed`, the same in all trials."""

    @field_validator("space")
    @classmethod
    def _may_vary(cls, space: Mapping[str, Dimension]) -> Mapping[str, Dimension]:
        for key in space:
            if any(f"{key}.".startswith(f"{fixed}.") for fixed in _FIXED):
                raise ValueError(f"{key} cannot be tuned: it is the same for all trials, or changes no training")
        for key in space:
            if any(other.startswith(f"{key}.") for other in space):
                raise ValueError(f"{key} and a key below it are both in the space")
        return space

    @model_validator(mode="after")
    def _fits_the_searcher(self) -> TuneSpec:
        for key, dimension in self.space.items():
            if self.searcher == "grid" and dimension.choice is None:
                raise ValueError(f"searcher: grid goes through lists; give `choice: [...]` for {key}")
        return self

    def problems(self, spec: Any) -> list[tuple[str, str]]:
        """Return the rules between a sweep and its pipeline that are broken."""
        found = []
        if spec.train.loop is None:  # a loop reports names of its own
            if not self.metric.startswith("val/"):
                found.append(("tune.metric", f"{self.metric!r} is not a validation metric; its name starts with val/"))
            if spec.data.validation is None:
                found.append(("tune.metric", f"{self.metric!r} needs a validation split; set data.validation"))
        if problem := mode_problem(self.metric, self.mode):
            found.append(("tune.mode", problem))
        return found

    def unmeasured(self, measured: Sequence[str]) -> SpecError | None:
        """Return the error that ends a sweep whose trials do not measure its metric."""
        if any(fnmatchcase(self.metric, name) for name in measured):
            return None
        return SpecError(
            f"tune.metric is {self.metric!r}, which validation does not measure{did_you_mean(self.metric, measured)}",
            next_step=f"choose one of {', '.join(measured)}" if measured else "report it with a checkpoint",
        )

    @property
    def limit(self) -> int:
        """How many trials there are at most."""
        if self.searcher != "grid":
            return self.trials or 10
        cells = math.prod(len(dimension.extremes) for dimension in self.space.values())
        return min(cells, self.trials or cells)
