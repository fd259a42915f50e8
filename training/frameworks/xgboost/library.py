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
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import xgboost
from numpy.typing import NDArray
from xgboost.collective import CommunicatorContext

from penstock.errors import SpecError
from penstock.storage import Storage
from penstock.training.frameworks.boosted.library import Floats, Library, ShardTable, Task, choose_objective, refuse_unused
from penstock.training.frameworks.boosted.model import BoostedModel, load_boosted
from penstock.training.model import ModelSpec
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

_OF_THE_PROCESS = ("verbosity", "use_rmm")
"""Parameters of the process, not of a booster."""

_UPDATERS = ("prune", "grow_quantile_histmaker")
"""Another updater, then that of `tree_method: hist`: the change makes a new updater."""


def _distribution() -> str:
    """`xgboost`, or the smaller one that has no code for GPUs."""
    for name in ("xgboost", "xgboost-cpu"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return name
    return "xgboost"


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
        self._booster = xgboost.Booster(params, list(self._rows.values()), model_file=start)
        refuse_unused("xgboost", task.params, {*_names_in(json.loads(self._booster.save_config())), *_OF_THE_PROCESS})
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

    def train_loss(self) -> None:
        """None: predictions are cheap."""

    def content(self, rounds: int) -> bytes:
        """Encode as UBJSON."""
        whole = rounds == self._booster.num_boosted_rounds()
        return bytes((self._booster if whole else self._booster[:rounds]).save_raw("ubj"))


class XgboostForest:
    """See `penstock.training.frameworks.boosted.library.Forest`."""

    def __init__(self, content: bytes) -> None:
        self._booster = xgboost.Booster(model_file=bytearray(content))

    def predict(self, matrix: Floats) -> NDArray[Any]:
        """Predict in this process, with as many threads as torch has here."""
        made: NDArray[Any] = self._booster.inplace_predict(matrix)
        return made

    def gains(self) -> NDArray[np.float64]:
        """Sum the gains; 0 for a feature without a split."""
        names = self._booster.feature_names or [f"f{number}" for number in range(self._booster.num_features())]
        found = self._booster.get_score(importance_type="total_gain")
        return np.asarray([np.sum(found.get(name, 0.0)) for name in names], np.float64)

    @property
    def rounds(self) -> int:
        """See `Forest`."""
        return int(self._booster.num_boosted_rounds())

    @property
    def names(self) -> list[str]:
        """See `Forest`."""
        return list(self._booster.feature_names or ())

    @property
    def objective(self) -> tuple[str, int]:
        """See `Forest`."""
        learner = json.loads(self._booster.save_config())["learner"]
        return learner["objective"]["name"], max(1, int(learner["learner_model_param"]["num_class"]))


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
    distribution = _distribution()
    version = xgboost.__version__
    loader = "penstock.training.frameworks.xgboost.library:load"
    file = "model.ubj"
    for_few_rows: Mapping[str, Any] = MappingProxyType({"base_score": 0.5})
    trees_of = XgboostTrees
    forest = XgboostForest
    refusal = ValueError
    lost = ("rabit", "collective")

    def check(self, params: Mapping[str, Any]) -> None:
        """Refuse parameters that do not work on quantiles of the rows."""
        for name, known in (("tree_method", ("hist", "auto")), ("booster", ("gbtree", "dart"))):
            if name in params and params[name] not in known:
                raise SpecError(f"train.params.{name} is {params[name]!r}; it can be {' or '.join(known)}")
        if not params.get("seed_per_iteration", True):
            raise SpecError("train.params.seed_per_iteration is false: a continued training would differ; take it out")

    def changes_earlier_trees(self, params: Mapping[str, Any]) -> bool:
        """See `Library.changes_earlier_trees`."""
        return params.get("booster") == "dart"

    def settings(self, task: Task) -> dict[str, Any]:
        """See `Library.settings`."""
        objective = choose_objective(task, _FITTING, task.params.get("objective"))
        classes = task.schema.num_classes or 0
        more: dict[str, Any] = {"num_class": classes} if classes > 2 else {}
        usual = {"seed": task.seed, "seed_per_iteration": True, "nthread": task.threads, "tree_method": "hist"}
        return {**usual, **more, **task.params, "objective": objective}

    def most_leaves(self, params: Mapping[str, Any]) -> int:
        """Estimate by `max_leaves`, or the depth."""
        return int(params.get("max_leaves") or 2 ** min(int(params.get("max_depth") or 6), 20))

    def reason(self, error: Exception) -> str:
        """Extract the first line, without xgboost's clock, source file and stack."""
        text = str(error).splitlines()[0]
        return text.partition(": ")[2] or text

    @contextmanager
    def _joined(self, group: Group, host: str) -> Iterator[dict[str, Any]]:
        """Connect by xgboost's tracker, on rank 0."""
        address = group.from_first(_start_tracker(group.world_size, host) if group.is_first else None)
        # The task's id puts the ranks into the same order.
        with (
            xgboost.config_context(verbosity=0),
            CommunicatorContext(dmlc_communicator="rabit", dmlc_task_id=f"{group.rank:08d}", **address),
        ):
            yield {}


LIBRARY = XgboostLibrary()


def load(spec: ModelSpec, files: Storage) -> BoostedModel:
    """Load the trees; `files` are a checkpoint's, or those of a registered model."""
    return load_boosted(LIBRARY, spec, files)
