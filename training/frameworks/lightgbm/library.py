"""How does lightgbm grow trees on several ranks, so that a continued training grows the same ones?

A continued training starts with the scores of the model: the same sums of the same leaves. The generator that draws features
goes on from round to round, so each round gets seeds of its own if features are drawn. The states of bagging, GOSS and DART
cannot be restored: see `not_repeatable`.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import lightgbm
import numpy as np
import torch
from lightgbm.basic import LightGBMError, _ConfigAliases, _InnerPredictor
from numpy.typing import NDArray

from penstock.training.frameworks.boosted.library import Library
from penstock.training.frameworks.boosted.table import Floats, ShardTable, Task
from penstock.training.ranks import Group

__all__ = ["LIBRARY", "LightgbmLibrary", "load"]

_FITTING = {
    "binary": ("binary", "cross_entropy"),
    "classes": ("multiclass", "softmax"),
    "number": ("regression", "regression_l1", "huber", "fair", "poisson", "quantile", "mape", "gamma", "tweedie"),
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

_OF_THIS_RUN = re.compile(r"\nparameters:.*?end of parameters\n|\npandas_categorical:[^\n]*", re.DOTALL)
"""Addresses and threads of the ranks, in a model's text."""

_CLASSES = "\npenstock_classes:"
"""Begins the line after the trees that has the names of the label's classes, as JSON; lightgbm reads past it."""

TIME_OUT_MIN = 120
"""Limit of a rank's work while the others wait; Ray Train detects dead ranks."""


class LightgbmTrees:
    """See `penstock.training.frameworks.boosted.library.Trees`."""

    def __init__(
        self, params: dict[str, Any], task: Task, train: ShardTable, validation: ShardTable | None, content: bytes | None
    ) -> None:
        self._seed, self._classes = task.seed, task.schema.classes
        rows = _dataset(train, params)
        if content is not None:  # as lightgbm.train does for its init_model
            self._begun = lightgbm.Booster(model_str=content.decode())  # kept alive: the predictor holds only its address
            # Another number of threads would stay after the prediction, and linear trees then write past their buffers.
            rows._set_predictor(_InnerPredictor.from_booster(self._begun, pred_parameter={"num_threads": task.threads}))
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

    def content(self, rounds: int) -> bytes:
        """Encode as text, without values that differ from run to run."""
        # Read once: a tree without a split, once read, is written differently.
        read = lightgbm.Booster(model_str=self._booster.model_to_string(num_iteration=rounds))
        names = "" if self._classes is None else f"{_CLASSES}{json.dumps(self._classes)}\n"
        return (_OF_THIS_RUN.sub("", read.model_to_string()) + names).encode()


class LightgbmForest:
    """See `penstock.training.frameworks.boosted.model.Forest`."""

    def __init__(self, content: bytes) -> None:
        text = content.decode()
        self._booster = booster = lightgbm.Booster(model_str=text)
        self.rounds, self.names = int(booster.current_iteration()), list(booster.feature_name())
        self.objective = str(booster.dump_model(num_iteration=1)["objective"]), int(booster.num_model_per_iteration())
        names = text.rpartition(_CLASSES)[2] if _CLASSES in text else None
        self.classes: tuple[str, ...] | None = None if names is None else tuple(json.loads(names))

    def predict(self, matrix: Floats) -> NDArray[Any]:
        """Predict in this process, with as many threads as torch has here."""
        return np.asarray(self._booster.predict(matrix, num_threads=torch.get_num_threads()))

    def gains(self) -> NDArray[np.float64]:
        """Sum the gains; 0 for a feature without a split."""
        return np.asarray(self._booster.feature_importance("gain"), np.float64)


_SEEDS = ("feature_fraction_seed", "extra_seed")


def _dataset(shard: ShardTable, params: dict[str, Any]) -> lightgbm.Dataset:
    matrix, first = np.empty((len(shard.labels), len(shard.names)), np.float32), 0
    for part, _ in shard.batches():
        matrix[first : first + len(part)] = part
        first += len(part)
    return lightgbm.Dataset(matrix, shard.labels, feature_name=shard.names, params=params)


class LightgbmLibrary(Library):
    """See `penstock.training.frameworks.boosted.library.Library`."""

    name = "lightgbm"
    libraries = ("lightgbm",)
    version = lightgbm.__version__
    loader = "penstock.training.frameworks.lightgbm.library:load"
    model_files = ("model.txt",)
    trees_of = LightgbmTrees
    forest = LightgbmForest
    refusal = LightGBMError
    lost = ("socket", "recv", "send", "connect", "linker", "network")
    fitting = _FITTING
    usual: Mapping[str, Any] = {"verbosity": -1, "deterministic": True, "metric": "None"}
    values: Mapping[str, tuple[Any, ...]] = {
        "boosting": ("gbdt", "gbrt", "dart", "goss"),  # a random forest cannot continue from a checkpoint
        "deterministic": (True,),
    }
    decided: Mapping[str, str] = {
        **dict.fromkeys(_OF_ITS_COMMAND, "only lightgbm's own command reads it; take it out"),
        **dict.fromkeys(_OF_THE_RANKS, "penstock connects the workers, each with its rows; take it out"),
    }
    known = _MAIN_NAMES

    def settings(self, task: Task) -> dict[str, Any]:
        """See `Library.settings`."""
        made = super().settings(task)  # without a choice lightgbm times both, which is nondeterministic
        return made if made.get("force_col_wise") else {"force_row_wise": True, **made}

    def main_name(self, name: str) -> str:
        """See `Library.main_name`."""
        return _MAIN_NAMES.get(name, name)

    def not_repeatable(self, params: Mapping[str, Any]) -> str | None:
        """Name the parameter whose state lightgbm does not keep from round to round."""
        params = {self.main_name(name): value for name, value in params.items()}
        drawn = [name for name in _ROW_SHARES if float(params.get(name, 1)) < 1 and float(params.get("bagging_freq", 0)) > 0]
        drawn += [name for name in ("boosting", "data_sample_strategy") if params.get(name) in ("dart", "goss")]
        drawn += [name for name in _UNKEPT if params.get(name)]
        names = [params[name] if isinstance(params[name], str) else name for name in drawn]
        return f"lightgbm does not keep the state of {' and '.join(names)}" if names else None

    @contextmanager
    def joined(self, group: Group, host: str) -> Iterator[dict[str, Any]]:
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

load = LIBRARY.load
