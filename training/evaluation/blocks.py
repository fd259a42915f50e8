"""How do several processes measure one split, to the same bits as one does alone?

A *block* is some batches of the split, cut where one process alone would cut them. Another process answers to a block: it loads
the same weights and gives the model's loss and predictions of each batch. They are counted in the order of the batches, by
the process that measures, so no sum is added up in another order, and who answered to which block changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from penstock.ingest.feed.batch import Feed
from penstock.ingest.schema import METRICS_OF, Split
from penstock.storage import Storage
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, TrainedModel, load_model
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues, Reduce, collecting, log, logged_rows

__all__ = ["BLOCK_BATCHES", "Answer", "BlockScorer", "BlocksOf", "num_blocks", "shared_out", "threads_of"]


BLOCK_BATCHES = 16

BlocksOf = Callable[[Split, int], "list[Answer] | None"]
"""Of a split and the number of a block: what another process has answered, or None for the caller to answer to it itself."""


class Answer(NamedTuple):
    """A model's answer to one batch. Picklable."""

    loss: Tensor
    output: Tensor | None
    logged: list[tuple[str, Any, Reduce]]
    """What user code logged meanwhile: name, value, how it is reduced, and whether the name is complete."""


def num_blocks(job: TrainJob, split: Split) -> int:
    """How many blocks a split has."""
    return -(-job.manifest.rows[split] // (BLOCK_BATCHES * job.spec.batch_rows))


def threads_of(job: TrainJob) -> int:
    """How many threads a measuring process computes with: how a sum is cut decides its last bits."""
    return max(1, int(job.spec.cpus_per_worker))


class BlockScorer:
    """A process that answers to blocks."""

    def __init__(self, job: TrainJob, model: ModelSpec, files: Storage) -> None:
        self._job, self._model = job, load_model(model, files)
        self._feeds: dict[Split, Feed] = {}

    @torch.no_grad()
    def answers(self, split: Split, block: int) -> list[Answer]:
        """The model's answers to the batches of a block, in order."""
        if split not in self._feeds:
            self._feeds[split] = open_job_feed(self._job, split, 0, 1, self._model.device)
        batches = self._feeds[split].batches(0, block * BLOCK_BATCHES * self._job.spec.batch_rows)
        found = []
        own = _Logged(METRICS_OF[split])
        with collecting(own):
            for batch in islice(batches, BLOCK_BATCHES):
                logged_rows(batch.rows)
                loss = self._model.loss(batch.columns).cpu()
                output = self._model.predict(batch.columns, batch.rows).cpu() if self._model.can_predict else None
                found.append(Answer(loss, output, own.taken()))
        return found


class _Logged(OwnValues):
    """Keeps what is logged, to be logged again elsewhere."""

    def __init__(self, phase: str) -> None:
        super().__init__(None, phase)
        self._calls: list[tuple[str, Any, Reduce]] = []

    def add(self, name: str, value: Any, reduce: Reduce) -> None:
        super().add(name, value, reduce)
        number = value.detach().reshape(()).double().cpu() if hasattr(value, "detach") else float(value)
        self._calls.append((name, number, reduce))

    def taken(self) -> list[tuple[str, Any, Reduce]]:
        """What was logged since it was asked last."""
        calls, self._calls = self._calls, []
        return calls


def shared_out(model: TrainedModel, split: Split, blocks: BlocksOf) -> TrainedModel:
    """The model, as it answers to the batches of a split from the first to the last, some of which others have answered to."""
    return cast("TrainedModel", _SharedOut(model, split, blocks))


class _SharedOut:
    def __init__(self, model: TrainedModel, split: Split, blocks: BlocksOf) -> None:
        self._model, self._split, self._blocks = model, split, blocks
        self._batch = 0
        self._answers: list[Answer] | None = None
        self._answer: Answer | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Of the next batch."""
        block, index = divmod(self._batch, BLOCK_BATCHES)
        self._batch += 1
        if index == 0:
            self._answers = self._blocks(self._split, block)
        self._answer = None if self._answers is None else self._answers[index]
        if self._answer is None:
            return self._model.loss(batch)
        for name, value, reduce in self._answer.logged:
            log(name, value, reduce)
        return self._answer.loss.to(self._model.device)

    def predict(self, batch: dict[str, Tensor], rows: int) -> Tensor:
        """Of the batch whose loss was asked for last."""
        if self._answer is None or self._answer.output is None:
            return self._model.predict(batch, rows)
        return self._answer.output.to(self._model.device)
