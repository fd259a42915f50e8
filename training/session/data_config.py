"""Which datasets does every worker get whole? By `train.datasets`: a mapping, or the code of a `ray.train.DataConfig`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import ray.train

from penstock.errors import SpecError
from penstock.messages import describe_error
from penstock.training.job import TrainJob
from penstock.training.spec import split_names
from penstock.usercode.capture import UserCode

__all__ = ["whole_datasets", "whole_of"]


def whole_of(job: TrainJob, world_size: int) -> Collection[str]:
    """Return the datasets that are not split over the ranks."""
    if job.data_config is not None:
        return whole_datasets(job.data_config, [*job.manifest.rows], world_size)
    names = split_names(job.spec.datasets)
    return [names.get(name, name) for name, how in job.spec.own_datasets.items() if how == "whole"]


def whole_datasets(code: UserCode, there: Sequence[str], world_size: int) -> frozenset[str]:
    """Return the datasets that every worker gets whole.

    Args:
        code: of a DataConfig, or of a class or function that makes one without arguments. `enable_shard_locality` has no
            effect: it changes no share. A `configure()` of its own is called, and only decides which datasets are split.
        there: names of the datasets.

    Raises:
        SpecError: it is not a DataConfig, or penstock's feed does not support one of its settings; all are listed.
    """
    config = code.load()
    if not isinstance(config, ray.train.DataConfig) and callable(config):
        try:
            config = config()
        except Exception as error:  # the user's code
            raise SpecError(f"train.datasets: {code.target}() failed: {describe_error(error)}") from error
    if not isinstance(config, ray.train.DataConfig):
        raise SpecError(
            f"train.datasets: {code.target} is a {type(config).__name__}, not a ray.train.DataConfig",
            next_step="or write which are whole: train.datasets: {validation: whole}",
        )
    names = split_names({})
    cut = list(there) if config._datasets_to_split == "all" else [names.get(each, each) for each in config._datasets_to_split]
    problems = []
    if type(config).default_ingest_options is not ray.train.DataConfig.default_ingest_options:
        problems.append("its own default_ingest_options() is for Ray Data, which prepares nothing here")
    if config._user_execution_options is not None:
        problems.append("execution_options are Ray Data's, which prepares nothing here")
    problems += [f"datasets_to_split names {name!r}; there are {', '.join(there)}" for name in cut if name not in there]
    if problems:
        raise SpecError(
            f"train.datasets: {code.target} has settings that a pipeline does not support",
            problems=problems,
            next_step="keep DataConfig(datasets_to_split=[...]); what changes rows belongs under preprocess, their order "
            "under shuffle",
        )
    if type(config).configure is not ray.train.DataConfig.configure:
        return _configured(config, code.target, there, world_size)
    return frozenset(name for name in there if name not in cut)


class _Named(NamedTuple):
    """A dataset in the call of a user's `configure()`: it can be split or given whole, and nothing else."""

    name: str
    rank: int | None = None
    """The worker whose part it is; None for all rows."""

    def streaming_split(self, n: int, *, equal: bool = False, locality_hints: Any = None) -> list[_Named]:
        return [_Named(self.name, rank) for rank in range(n)]

    def iterator(self) -> _Named:
        return self

    def __getattr__(self, name: str) -> Any:
        raise SpecError(
            f"{name}() of the dataset {self.name!r}: a configure() decides only which datasets are split",
            next_step="what changes rows belongs under preprocess, their order under shuffle",
        )


def _configured(config: ray.train.DataConfig, target: str, there: Sequence[str], world_size: int) -> frozenset[str]:
    """Call the user's `configure()` and read from its result which datasets are whole."""
    others = [name for name, split in split_names({}).items() if split in there]
    datasets: Any = {name: _Named(name) for name in [*there, *others]}
    try:
        shards = config.configure(datasets, world_size, None, None)
        given = [{name: shard[name].rank for name in shard} for shard in shards]  # type: ignore[attr-defined]
    except SpecError as error:
        raise SpecError(f"train.datasets: {target}.configure(): {error.message}", next_step=error.next_step) from error
    except Exception as error:  # the user's code
        raise SpecError(f"train.datasets: {target}.configure() failed: {describe_error(error)}") from error
    names, whole = split_names({}), set()
    for name in {name for shard in given for name in shard}:
        ranks = [shard.get(name, -1) for shard in given]
        if ranks == [None] * world_size:
            whole.add(names.get(name, name))
        elif ranks != list(range(world_size)):
            raise SpecError(
                f"train.datasets: {target}.configure() gives the {world_size} workers the parts {ranks} of {name!r}",
                next_step="give worker i the i-th part of streaming_split(world_size), or every one iterator()",
            )
    return frozenset(whole)
