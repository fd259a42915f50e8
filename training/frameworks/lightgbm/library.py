"""How does lightgbm grow trees on several ranks, so that a continued training grows the same ones?

A continued training starts with the scores of the model: the same sums of the same leaves. The generator that draws features
goes on from round to round, so each round gets seeds of its own if features are drawn. The states of bagging, GOSS and DART
cannot be restored: see `not_repeatable`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import lightgbm
import numpy as np
import torch
from lightgbm.basic import LightGBMError, _ConfigAliases, _InnerPredictor
from numpy.typing import NDArray

from penstock.errors import SpecError
from penstock.storage import Storage
from penstock.training.frameworks.boosted.library import Floats, Library, ShardTable, Task, choose_objective, refuse_unused
from penstock.training.frameworks.boosted.model import BoostedModel, load_boosted
from penstock.training.model import ModelSpec
from penstock.training.ranks import Group

__all__ = ["LIBRARY", "LightgbmLibrary", "load"]

_FITTING = {
    "binary": ("binary", "cross_entropy"),
    "classes": ("multiclass", "softmax"),
    "number": (
        "regression",
        "regression_l1",
        "huber",
        "fair",
        "poisson",
        "quantile",
        "mape",
        "gamma",
        "tweedie",
    ),
}

_ROW_SHARES = ("bagging_fraction", "pos_bagging_fraction", "neg_bagging_fraction")

_FEATURE_DRAWS = ("feature_fraction", "feature_fraction_bynode", "extra_trees")

_OF_ITS_COMMAND = (
    *("config", "task", "data", "valid", "input_model", "output_model", "output_result", "snapshot_freq", "save_binary"),
    *("convert_model", "convert_model_language", "header", "label_column", "weight_column", "group_column", "ignore_column"),
)
"""Read by lightgbm's own command alone."""

_UNKEPT = ("use_quantized_grad", "cegb_penalty_feature_coupled", "cegb_penalty_feature_lazy")

_OF_THE_RANKS = ("tree_learner", "machines", "machine_list_filename", "num_machines", "local_listen_port", "pre_partition")

_MAIN_NAMES = {alias: name for name, aliases in _ConfigAliases._get_all_param_aliases().items() for alias in (name, *aliases)}


def _by_main_name(params: Mapping[str, Any]) -> dict[str, Any]:
    return {_MAIN_NAMES.get(name, name): value for name, value in params.items()}


_OF_THIS_RUN = re.compile(r"\nparameters:.*?end of parameters\n|\npandas_categorical:[^\n]*", re.DOTALL)
"""Addresses and threads of the ranks, in a model's text."""

TIME_OUT_MIN = 120
"""Limit of a rank's work while the others wait; Ray Train detects dead ranks."""


class LightgbmTrees:
    """See `penstock.training.frameworks.boosted.library.Trees`."""

    def __init__(
        self, params: dict[str, Any], task: Task, train: ShardTable, validation: ShardTable | None, content: bytes | None
    ) -> None:
        self._seed = task.seed
        rows = _dataset(train, params)
        if content is not None:  # as lightgbm.train does for its init_model
            self._begun = lightgbm.Booster(model_str=content.decode())  # kept alive: the predictor holds only its address
            rows._set_predictor(_InnerPredictor.from_booster(self._begun, pred_parameter={}))
        self._booster = lightgbm.Booster(params, rows)
        if validation is not None:
            self._booster.add_valid(_dataset(validation, params).set_reference(rows), "validation")  # with first scores
        self._draws = any(params.get(name, 1) not in (1, 1.0, False) or params.get(name) is True for name in _FEATURE_DRAWS)

    def grow(self, number: int) -> None:
        """Grow a round, with seeds of its own if features are drawn."""
        with LIBRARY.reraising():
            if self._draws:
                seeds = {name: (self._seed + 7919 * number + place) % 2**31 for place, name in enumerate(_SEEDS)}
                self._booster.reset_parameter(seeds)
            self._booster.update()

    def predictions(self, split: Literal["train", "validation"]) -> NDArray[Any]:
        """Return the scores that lightgbm keeps from round to round, by a metric that gets them."""
        seen: list[NDArray[Any]] = []

        def collect(predictions: NDArray[Any], rows: lightgbm.Dataset) -> tuple[str, float, bool]:
            seen.append(np.asarray(predictions, np.float32))
            return "", 0.0, True

        self._booster.eval_train(collect) if split == "train" else self._booster.eval_valid(collect)
        return seen[0]

    def train_loss(self) -> float:
        """Round lightgbm's loss to single precision: its threads add up in any order."""
        return float(np.float32(self._booster.eval_train()[0][2]))

    def content(self, rounds: int) -> bytes:
        """Encode as text, without values that differ from run to run."""
        # Read once: a tree without a split, once read, is written differently.
        read = lightgbm.Booster(model_str=self._booster.model_to_string(num_iteration=rounds))
        return _OF_THIS_RUN.sub("", read.model_to_string()).encode()


class LightgbmForest:
    """See `penstock.training.frameworks.boosted.library.Forest`."""

    def __init__(self, content: bytes) -> None:
        self._booster = lightgbm.Booster(model_str=content.decode())

    def predict(self, matrix: Floats) -> NDArray[Any]:
        """Predict in this process, with as many threads as torch has here."""
        return np.asarray(self._booster.predict(matrix, num_threads=torch.get_num_threads()))

    def gains(self) -> NDArray[np.float64]:
        """Sum the gains; 0 for a feature without a split."""
        return np.asarray(self._booster.feature_importance("gain"), np.float64)

    @property
    def rounds(self) -> int:
        """See `Forest`."""
        return int(self._booster.current_iteration())

    @property
    def names(self) -> list[str]:
        """See `Forest`."""
        return list(self._booster.feature_name())

    @property
    def objective(self) -> tuple[str, int]:
        """See `Forest`."""
        return self._booster.dump_model(num_iteration=1)["objective"], int(self._booster.num_model_per_iteration())


_SEEDS = ("feature_fraction_seed", "extra_seed")


def _dataset(shard: ShardTable, params: dict[str, Any]) -> lightgbm.Dataset:
    labels = np.concatenate([part for _, part in shard.batches()])
    matrix, first = np.empty((len(labels), len(shard.names)), np.float32), 0
    for part, _ in shard.batches():
        matrix[first : first + len(part)] = part
        first += len(part)
    return lightgbm.Dataset(matrix, labels, feature_name=shard.names, params=params)


class LightgbmLibrary(Library):
    """See `penstock.training.frameworks.boosted.library.Library`."""

    name = "lightgbm"
    distribution = "lightgbm"
    version = lightgbm.__version__
    loader = "penstock.training.frameworks.lightgbm.library:load"
    file = "model.txt"
    for_few_rows: Mapping[str, Any] = MappingProxyType({"min_data_in_leaf": 1, "min_data_in_bin": 1})
    trees_of = LightgbmTrees
    forest = LightgbmForest
    refusal = LightGBMError
    lost = ("socket", "recv", "send", "connect", "linker", "network")

    def check(self, params: Mapping[str, Any]) -> None:
        """Refuse parameters that are unknown, cannot be resumed or are nondeterministic."""
        refuse_unused("lightgbm", params, _MAIN_NAMES)
        for name in (name for name in params if _MAIN_NAMES[name] in _OF_ITS_COMMAND):
            raise SpecError(f"train.params.{name}: only lightgbm's own command reads it; take it out")
        for name in (name for name in params if _MAIN_NAMES[name] in _OF_THE_RANKS):
            raise SpecError(f"train.params.{name}: penstock connects the workers, each with its rows; take it out")
        params = _by_main_name(params)
        if params.get("boosting") in ("rf", "random_forest"):
            raise SpecError(f"train.params.boosting is {params['boosting']!r}: a forest cannot continue from a checkpoint")
        if params.get("deterministic") is False:
            raise SpecError("train.params.deterministic is false: a continued training would differ; take it out")

    def settings(self, task: Task) -> dict[str, Any]:
        """See `Library.settings`."""
        params = _by_main_name(task.params)
        objective = choose_objective(task, _FITTING, params.get("objective"))
        classes = task.schema.num_classes or 0
        usual: dict[str, Any] = {"seed": task.seed, "verbosity": -1, "num_threads": task.threads, "deterministic": True}
        if not params.get("force_col_wise"):
            usual["force_row_wise"] = True  # else lightgbm times both, which is nondeterministic
        more = {"num_class": classes} if classes > 2 else {}
        metric = "l2" if task.schema.num_classes is None else "multi_logloss" if classes > 2 else "binary_logloss"
        return {**usual, **more, **params, "metric": metric, "objective": objective}

    def main_name(self, name: str) -> str:
        """See `Library.main_name`."""
        return _MAIN_NAMES.get(name, name)

    def changes_earlier_trees(self, params: Mapping[str, Any]) -> bool:
        """See `Library.changes_earlier_trees`."""
        return _by_main_name(params).get("boosting") == "dart"

    def not_repeatable(self, params: Mapping[str, Any]) -> str | None:
        """Name the parameter whose state lightgbm does not keep from round to round."""
        params = _by_main_name(params)
        drawn = [name for name in _ROW_SHARES if float(params.get(name, 1)) < 1]
        drawn += [name for name in ("boosting", "data_sample_strategy") if params.get(name) in ("dart", "goss")]
        drawn += [name for name in _UNKEPT if params.get(name)]
        names = [params[name] if isinstance(params[name], str) else name for name in drawn]
        return f"lightgbm does not keep the state of {' and '.join(names)}" if names else None

    def most_leaves(self, params: Mapping[str, Any]) -> int:
        """Return `num_leaves`."""
        return int(_by_main_name(params).get("num_leaves", 31))

    @contextmanager
    def _joined(self, group: Group, host: str) -> Iterator[dict[str, Any]]:
        """Choose a free port on every rank; lightgbm connects them while the trees exist."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        everyone = group.everyones({"address": f"{host}:{port}"})
        yield {
            "machines": ",".join(rank["address"] for rank in everyone),
            "num_machines": group.world_size,
            "local_listen_port": port,
            "time_out": TIME_OUT_MIN,
            "tree_learner": "data",
            "pre_partition": True,
        }


LIBRARY = LightgbmLibrary()


def load(spec: ModelSpec, files: Storage) -> BoostedModel:
    """Load the trees; `files` are a checkpoint's, or those of a registered model."""
    return load_boosted(LIBRARY, spec, files)
