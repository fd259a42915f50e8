"""Which datasets does the user's own `ray.train.DataConfig` cut over the workers? `train.datasets: file.py:Name`."""

from __future__ import annotations

from ray.train import DataConfig

from penstock.errors import SpecError
from penstock.ingest.schema import SPLITS, Split
from penstock.messages import said_of
from penstock.usercode.capture import UserCode

__all__ = ["whole_datasets"]


def whole_datasets(code: UserCode) -> frozenset[Split]:
    """The datasets that every worker gets all of.

    Args:
        code: of a DataConfig, or of a class or function that makes one without arguments. Its `enable_shard_locality` is taken
            whatever it says: a hint where rows should lie, which changes no share.

    Raises:
        SpecError: it is none, or asks for what penstock's feed does not do, each by its name.
    """
    config = code.load()
    if not isinstance(config, DataConfig) and callable(config):
        try:
            config = config()
        except Exception as error:  # the user's code
            raise SpecError(f"train.datasets: {code.target}() failed: {said_of(error)}") from error
    if not isinstance(config, DataConfig):
        raise SpecError(
            f"train.datasets: {code.target} is a {type(config).__name__}, not a ray.train.DataConfig",
            next_step="or write which are whole: train.datasets: {validation: whole}",
        )
    cut = list(SPLITS) if config._datasets_to_split == "all" else config._datasets_to_split
    problems = [
        f"its own {name}() works on Ray Data's datasets, and these rows come from penstock's feed"
        for name in ("configure", "default_ingest_options")
        if getattr(type(config), name) is not getattr(DataConfig, name)
    ]
    if config._user_execution_options is not None:
        problems.append("execution_options are Ray Data's, which prepares nothing here")
    problems += [f"datasets_to_split names {name!r}; there are {', '.join(SPLITS)}" for name in cut if name not in SPLITS]
    if problems:
        raise SpecError(
            f"train.datasets: {code.target} asks for what a pipeline does not do",
            problems=problems,
            next_step="keep DataConfig(datasets_to_split=[...]); what changes rows belongs under preprocess, their order "
            "under shuffle",
        )
    return frozenset(split for split in SPLITS if split not in cut)
