"""How do boosted trees train in the pipeline, whatever library grows them?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from penstock.errors import SpecError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.training.frameworks.boosted.library import Library, ShardTable, Task
from penstock.training.frameworks.boosted.model import BoostedPredicts, loss_of
from penstock.training.frameworks.boosted.rank import run_boosted_rank, without_patience
from penstock.training.frameworks.boosted.rounds import PATIENCE, rounds_of
from penstock.training.frameworks.framework import TriedBatch
from penstock.training.frameworks.on_workers import OnWorkers
from penstock.training.model import Predicts
from penstock.training.on_ray.worker import RankResult
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import UserCode

__all__ = ["BoostedFramework"]

_ROUNDS = ("num_boost_round", "num_iterations", "n_estimators", "num_rounds", "num_trees", "n_iter")

_DECIDED = {
    **dict.fromkeys(_ROUNDS, "train.epochs is the number of rounds"),
    **dict.fromkeys(("nthread", "n_jobs", "num_threads"), "train.cpus_per_worker is the number of threads"),
    **dict.fromkeys(("seed", "random_state"), "shuffle.seed is the seed"),
    "num_class": "the label decides the number of classes",
    **dict.fromkeys(("device", "device_type"), "trees are trained on CPUs"),
    **dict.fromkeys(("eval_metric", "metric"), "train.checkpoint.best and evaluate.metrics name the metrics"),
    "early_stopping_round": f"write {PATIENCE}",
}
"""Parameter, by the library's main name -> the key of the pipeline file that replaces it."""

_OF_OTHERS = ("callbacks", "precision", "compile", "accumulate", "clip_norm", "learning_rate")

BYTES_PER_LEAF = 120
"""Bytes of a file for each leaf, with the node above it."""


class BoostedFramework(OnWorkers):
    """See `penstock.training.frameworks.framework.Framework`."""

    a_step = "a round, which learns from all rows of the train split, or from those that the library draws of them"
    on_cpus = True

    def __init__(self, library: Library) -> None:
        self._library = library

    @property
    def run_rank(self) -> Callable[..., RankResult]:
        """Grows rounds with this library."""
        return partial(run_boosted_rank, self._library)

    @property
    def libraries(self) -> tuple[str, ...]:
        """The installed library."""
        return (self._library.distribution,)

    @property
    def loader(self) -> str:
        """The library's loader."""
        return self._library.loader

    @property
    def model_files(self) -> tuple[str, ...]:
        """The trees."""
        return (self._library.file,)

    def check(self, code: UserCode, spec: TrainSpec) -> Predicts:
        """Refuse a recipe, and parameters that keys of the pipeline file replace."""
        main = {name: self._library.main_name(name) for name in spec.params if name != PATIENCE}
        problems = [f"params.{name}: {_DECIDED[main[name]]}" for name in main if main[name] in _DECIDED]
        names = [*main.values()]
        problems += [f"params.{name}: {main[name]} is given twice" for name in main if names.count(main[name]) > 1]
        unread = spec.set_by_user(_OF_OTHERS)
        problems += [f"{name}: {self._library.name} does not read it; its own settings are in params" for name in unread]
        if spec.recipe is not None:
            problems.append(f"recipe: trees need no code; params.objective names one of {self._library.name}'s")
        if not spec.set_by_user(["epochs"]) and spec.max_steps is None:
            problems.append("epochs is missing: it is the number of rounds, such as 200")
        if spec.checkpoint.best is not None and self._library.changes_earlier_trees(spec.params):
            problems.append("checkpoint.best: DART changes the trees of earlier rounds, so the best round is lost; take it out")
        if PATIENCE in spec.params and spec.checkpoint.best is None:
            problems.append(f"params.{PATIENCE} needs checkpoint.best, such as {{metric: val/loss, mode: min}}")
        if problems:
            raise SpecError(
                f"train does not fit {self._library.name}",
                problems=[f"train.{problem}" for problem in problems],
                next_step="correct the train section; docs/boosted.md has an example",
            )
        self._library.check(spec.params)
        return BoostedPredicts()

    def try_batch(self, code: UserCode, spec: TrainSpec, schema: FeedSchema, batch: Batch, seed: int) -> TriedBatch:
        """Grow one round on the rows of a batch, too few for a base score."""
        params = without_patience(spec.params)
        task = Task(schema, params, seed, max(1, int(spec.cpus_per_worker)))
        shard = ShardTable(task.table, _OneBatch(batch))  # type: ignore[arg-type]  # the only method that a table calls
        trees = self._library.trees(task, shard, None, None, self._library.for_few_rows)
        trees.grow(0)
        output = torch.from_numpy(trees.predictions("train"))
        label = torch.from_numpy(next(shard.batches())[1])
        loss = loss_of(output, label, schema)
        classes = schema.num_classes or 2
        leaves = self._library.most_leaves(params) * (1 if classes == 2 else classes) * rounds_of(spec)
        shape = list(output.shape)
        return TriedBatch(
            loss=float(loss),
            parameters=leaves,
            weights_bytes=0,
            checkpoint_bytes=leaves * BYTES_PER_LEAF,
            predict_shape=shape,
            logged=[],
        )


@dataclass(frozen=True)
class _OneBatch:
    """A feed of one batch, for a shard table."""

    batch: Batch

    def batches(self, epoch: int) -> Iterator[Batch]:
        yield self.batch
