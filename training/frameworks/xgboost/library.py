"""How does xgboost grow trees on several ranks, so that a continued training grows the same ones?

Predictions on the training rows are the same sums of the same leaves. Random numbers come from the seed and the number of the
round (`seed_per_iteration`); but the object that draws columns keeps a generator from round to round, so it is made anew for
each round if anything is drawn.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import xgboost
from numpy.typing import NDArray
from xgboost.collective import CommunicatorContext

from penstock.training.frameworks.boosted.library import Library, refuse_unused
from penstock.training.frameworks.boosted.table import Floats, ShardTable, Task
from penstock.training.frameworks.on_workers import installed
from penstock.training.ranks import Group

__all__ = ["LIBRARY", "XgboostLibrary", "load"]

_FITTING = {
    "binary": ("binary:logistic",),
    "classes": ("multi:softprob",),
    "number": (
        "reg:squarederror",
        "reg:absoluteerror",
        "reg:pseudohubererror",
        "reg:squaredlogerror",
        "reg:gamma",
        "reg:tweedie",
        "count:poisson",
    ),
}

_DRAWS = ("subsample", "colsample_bytree", "colsample_bylevel", "colsample_bynode")

_CLASSES = "penstock_classes"
"""The booster's attribute with the names of the label's classes, as JSON."""

_OF_THE_PROCESS = ("verbosity", "use_rmm")
"""Parameters of the process, not of a booster."""

_UPDATERS = ("prune", "grow_quantile_histmaker")
"""Another updater, then that of `tree_method: hist`: the change makes a new updater."""


class XgboostTrees:
    """See `penstock.training.frameworks.boosted.library.Trees`."""

    def __init__(
        self, params: dict[str, Any], task: Task, train: ShardTable, validation: ShardTable | None, content: bytes | None
    ) -> None:
        bins = int(params.get("max_bin", 256))
        self._rows = {"train": xgboost.QuantileDMatrix(_Rows(train), max_bin=bins)}
        if validation is not None:
            reference = self._rows["train"]
            self._rows["validation"] = xgboost.QuantileDMatrix(_Rows(validation), max_bin=bins, ref=reference)
        start = bytearray(content) if content is not None else None
        given = {name: value for name, value in params.items() if start is None or name != "base_score"}  # trees have theirs
        self._booster = xgboost.Booster(given, list(self._rows.values()), model_file=start)
        refuse_unused("xgboost", task.params, {*_names_in(json.loads(self._booster.save_config())), *_OF_THE_PROCESS})
        if task.schema.classes is not None:
            self._booster.set_attr(**{_CLASSES: json.dumps(task.schema.classes)})
        self._draws = any(float(params.get(name, 1)) < 1 for name in _DRAWS)

    def grow(self, number: int) -> None:
        """Grow a round, with a new updater if anything is drawn."""
        if self._draws:
            # xgboost warns once, past Python, that the updater is set by hand.
            with xgboost.config_context(verbosity=0):
                self._booster.set_param("updater", _UPDATERS[0])
                self._booster.save_config()  # which applies the change
                self._booster.set_param("updater", _UPDATERS[1])
        with LIBRARY.reraising():
            self._booster.update(self._rows["train"], number)

    def predictions(self, split: Literal["train", "validation"]) -> NDArray[Any]:
        """Predict; xgboost keeps the sums of leaves, so only the newest trees are evaluated."""
        made: NDArray[Any] = self._booster.predict(self._rows[split])
        return made

    def content(self, rounds: int) -> bytes:
        """Encode as UBJSON."""
        whole = rounds == self._booster.num_boosted_rounds()
        return bytes((self._booster if whole else self._booster[:rounds]).save_raw("ubj"))


class XgboostForest:
    """See `penstock.training.frameworks.boosted.model.Forest`."""

    def __init__(self, content: bytes) -> None:
        self._booster = xgboost.Booster(model_file=bytearray(content))
        learner, names = json.loads(self._booster.save_config())["learner"], self._booster.attr(_CLASSES)
        self.rounds, self.names = int(self._booster.num_boosted_rounds()), list(self._booster.feature_names or ())
        self.objective = learner["objective"]["name"], max(1, int(learner["learner_model_param"]["num_class"]))
        self.classes: tuple[str, ...] | None = None if names is None else tuple(json.loads(names))

    def predict(self, matrix: Floats) -> NDArray[Any]:
        """Predict in this process, with as many threads as torch has here."""
        made: NDArray[Any] = self._booster.inplace_predict(matrix)
        return made

    def gains(self) -> NDArray[np.float64]:
        """Sum the gains; 0 for a feature without a split."""
        found = self._booster.get_score(importance_type="total_gain")
        return np.asarray([np.sum(found.get(name, 0.0)) for name in self.names], np.float64)


def _names_in(config: Any) -> Iterator[str]:
    """Yield the names of all settings of a booster; it ignores other parameters."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield name
            yield from _names_in(value)
    elif isinstance(config, list):
        for value in config:
            yield from _names_in(value)


class _Rows(xgboost.DataIter):
    """A shard's batches, for several passes of xgboost."""

    def __init__(self, shard: ShardTable) -> None:
        self._shard = shard
        self._batches: Iterator[tuple[Floats, Floats]] = iter(())
        super().__init__()

    def reset(self) -> None:
        """Start a pass."""
        self._batches = self._shard.batches()

    def next(self, input_data: Callable[..., Any]) -> bool:
        """Pass the next batch; False at the end."""
        batch = next(self._batches, None)
        if batch is None:
            return False
        input_data(data=batch[0], label=batch[1], feature_names=self._shard.names)
        return True


def _start_tracker(ranks: int, host: str) -> dict[str, Any]:
    """Start xgboost's rendezvous server in this process; it ends when all ranks have left. Returns its address."""
    tracker = xgboost.RabitTracker(n_workers=ranks, host_ip=host, sortby="task")
    tracker.start()
    threading.Thread(target=tracker.wait_for, name="penstock-xgboost-tracker", daemon=True).start()
    return dict(tracker.worker_args())


class XgboostLibrary(Library):
    """See `penstock.training.frameworks.boosted.library.Library`."""

    name = "xgboost"
    libraries = installed("xgboost", "xgboost-cpu")[:1]  # the smaller one has no code for GPUs
    version = xgboost.__version__
    loader = "penstock.training.frameworks.xgboost.library:load"
    model_files = ("model.ubj",)
    trees_of = XgboostTrees
    forest = XgboostForest
    refusal = ValueError
    lost = ("rabit", "collective")
    fitting = _FITTING
    usual: Mapping[str, Any] = {"seed_per_iteration": True, "tree_method": "hist"}
    values: Mapping[str, tuple[Any, ...]] = {
        "tree_method": ("hist", "auto"),  # others do not work on quantiles of the rows
        "booster": ("gbtree", "dart"),
        "seed_per_iteration": (True,),  # else a continued training would differ
    }

    def reason(self, error: Exception) -> str:
        """Extract the first line, without xgboost's clock, source file and stack."""
        text = str(error).splitlines()[0]
        return text.partition(": ")[2] or text

    @contextmanager
    def joined(self, group: Group, host: str) -> Iterator[dict[str, Any]]:
        """Connect by xgboost's tracker, on rank 0."""
        address = group.from_first(_start_tracker(group.world_size, host) if group.is_first else None)
        # The task's id puts the ranks into the same order.
        with (
            xgboost.config_context(verbosity=0),
            CommunicatorContext(dmlc_communicator="rabit", dmlc_task_id=f"{group.rank:08d}", **address),
        ):
            yield {}


LIBRARY = XgboostLibrary()

load = LIBRARY.load
