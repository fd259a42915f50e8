"""How are rows prepared while training runs (`materialize.overlap`)? By an actor that commits units in the order of their use.

The stage begins with the predicted dataset; it is recorded once the actor has written the manifest. A kill of the driver ends
the actor, too: the next attempt finds the committed units, predicts the same dataset, and makes the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.errors import ServiceError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.build import materialize
from penstock.ingest.prepare import PrepareSpec
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.ray_tasks import raising_ours, ray_map
from penstock.ingest.shuffle.lanes import PartOf
from penstock.ingest.shuffle.order import Order
from penstock.ingest.task_counts import TaskCounts
from penstock.progress import silent
from penstock.redact import hiding_secrets
from penstock.tasks.context import RunContext
from penstock.tasks.shuffle import train_order
from penstock.tasks.spec import PipelineSpec

__all__ = ["Overlapped", "StopOrSettle", "begin_overlapped", "tasks_beside_workers", "units_by_use"]

_IDS_AT_ONCE, _MOST_IDS = 1 << 20, 1 << 30
"""Of all calls, which take ten seconds; units of later rows are made in row order."""


class _Materializer:
    """An actor that prepares the rows of one attempt. Its two calls run at the same time."""

    def __init__(self) -> None:
        self._begun: SimpleQueue[DatasetManifest] = SimpleQueue()

    def run(
        self, make: Callable[..., DatasetManifest], order_of: Callable[[DatasetManifest], Order], where: PrepareSpec
    ) -> tuple[DatasetManifest, TaskCounts]:
        """Make all units by `make`, which is `materialize` of this attempt, and raises as that does."""
        counts = TaskCounts()

        def begin(predicted: DatasetManifest) -> Sequence[str]:
            self._begun.put(predicted)
            return units_by_use(order_of(predicted), predicted)

        with hiding_secrets():
            return make(parallel=partial(ray_map, where=where, count=partial(counts.add, "materialize")), begin=begin), counts

    def begun(self) -> DatasetManifest:
        """Wait until training may begin, and return the predicted dataset."""
        return self._begun.get()


class Overlapped:
    """The materialize stage of an attempt whose training may have begun.

    Args:
        work: arguments of the actor's `run`.
        conclude: called with the dataset when it is made; returns the stage's output.

    Attributes:
        record: called with the stage's output.
    """

    def __init__(self, ctx: RunContext, work: Sequence[object], conclude: Callable[[DatasetManifest], dict[str, Any]]) -> None:
        self._ctx, self._conclude = ctx, conclude
        self.record: Callable[[dict[str, Any]], object] = lambda _output: None
        strategy = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        actor: Any = ray.remote(_Materializer)
        self._actor = actor.options(num_cpus=0, max_concurrency=2, scheduling_strategy=strategy).remote()
        self._made = self._actor.run.remote(*work)

    def begin(self) -> DatasetManifest:
        """Wait until training may begin, and return the predicted dataset. Raises as `settle`."""
        begun = self._actor.begun.remote()
        with raising_ours():
            ray.wait([begun, self._made])
            if ray.wait([begun], timeout=0)[0]:
                predicted: DatasetManifest = ray.get(begun)
                return predicted
            ray.get(self._made)
        raise AssertionError("the rows were prepared without a beginning")

    def settle(self, *, wait: bool = False) -> None:
        """Record the stage if the dataset is made; with `wait`, once it is.

        Raises:
            PenstockError: it could not be made.
        """
        if self._ctx.overlapped is not self or not (wait or ray.wait([self._made], timeout=0)[0]):
            return
        try:
            with raising_ours():
                manifest, counts = ray.get(self._made)
        except ServiceError as error:
            error.retried = True  # another try of this attempt's training would meet the same error
            raise
        # The actor ends last: if the store fails here, the next call records it.
        self.record(self._conclude(manifest.opened(self._ctx.storage)))
        self._ctx.task_counts.join(counts)
        self.end()

    def end(self) -> None:
        """End the actor; units that it has not committed are lost."""
        self._ctx.overlapped = None
        ray.kill(self._actor)


class StopOrSettle(threading.Event):
    """The stop of an attempt; the driver looks at it twice a second, which also settles the stage before."""

    def __init__(self, ctx: RunContext) -> None:
        super().__init__()
        self._ctx = ctx

    def is_set(self) -> bool:
        """Return whether training must stop. Raises as `Overlapped.settle`."""
        if self._ctx.overlapped is not None:
            self._ctx.overlapped.settle()
        return self._ctx.stopping.stop.is_set()


def begin_overlapped(
    ctx: RunContext, preparation: Preparation, conclude: Callable[[DatasetManifest], dict[str, Any]]
) -> dict[str, Any]:
    """Begin to prepare rows, and return the predicted dataset once training may begin: units that are there were checked.

    Args:
        conclude: see `Overlapped`.

    Raises:
        PenstockError: as `materialize`, of the first unit.
    """
    spec = ctx.project.spec
    most = max(1, tasks_beside_workers(spec))  # preflight has counted one more
    where = spec.prepare.model_copy(update={"concurrency": min(most, spec.prepare.concurrency or most)})
    key, storage = ctx.keys["materialize"].key, ctx.storage
    make = partial(materialize, key=key, preparation=preparation, spec=spec.materialize, storage=storage, progress=silent)
    order_of = partial(train_order, spec.shuffle, batch_rows=spec.train.lane_batch_rows)
    if ctx.overlapped is not None:  # a damaged shard is made again
        ctx.overlapped.end()
    ctx.overlapped = begun = Overlapped(ctx, (make, order_of, where), conclude)  # before the wait, which a signal may end
    return begun.begin().model_dump(mode="json")


def tasks_beside_workers(spec: PipelineSpec) -> int:
    """Return how many tasks may prepare rows on CPUs that the workers leave: their group would wait for others till the end."""
    there, held = ray.cluster_resources().get("CPU", 0.0), spec.train.workers * spec.train.cpus_per_worker
    return int((there - held) / (spec.prepare.cpus or 1.0) + 1e-9)


def units_by_use(order: Order, manifest: DatasetManifest) -> list[str]:
    """Return the keys of units with rows to train on, in the order in which epoch 0 reads them; of a long one, the first."""
    shards = manifest.shards_of("train")
    part_of, seen = PartOf(np.cumsum(shards.rows)), dict[int, None]()
    for start in range(0, min(order.rows, _MOST_IDS), _IDS_AT_ONCE):
        used, first = np.unique(part_of(order.ids(0, start, min(start + _IDS_AT_ONCE, order.rows))), return_index=True)
        seen.update(dict.fromkeys(used[np.argsort(first)].tolist()))
        if len(seen) == len(shards):
            break
    return list(dict.fromkeys(shards[index].unit for index in seen))
