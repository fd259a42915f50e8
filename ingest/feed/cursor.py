"""What is a feed, at which position is it, and which saved states may it continue?

A feed's state is (epoch, rows consumed by all ranks) and a description of the data. The number of ranks is not part of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import closing, nullcontext
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from penstock.config import Section
from penstock.errors import ResumeError, SpecError
from penstock.ingest.feed.batch import Augment, Batch, FeedShare
from penstock.ingest.feed.delivery import Delivery, wait_for
from penstock.ingest.feed.lists import packed_problem
from penstock.ingest.feed.read_ahead import ahead
from penstock.ingest.phases import phase
from penstock.ingest.schema import FeedSchema, Split
from penstock.ingest.shuffle.order import Order
from penstock.ingest.shuffle.row_generator import RowGenerator

__all__ = ["Feed", "FeedState", "check_augmented"]


class FeedState(Section):
    """Position of a feed, and enough about its data to refuse to continue with other data."""

    version: Literal[1] = 1
    fingerprint: str
    """Fingerprint of the order: of its parameters and some generated ids."""
    epoch: Annotated[int, Field(strict=True, ge=0)]
    position: Annotated[int, Field(strict=True, ge=0)]
    """Rows consumed by all ranks in this epoch."""
    batch_rows: PositiveInt
    split: Split
    rows: NonNegativeInt
    """Positions of an epoch."""
    content: str
    """Digest of the split's content."""
    seed: int
    shuffle: str
    """Mode of the order."""
    augment_seed: int | None = None
    """None without augmentation."""


class Feed:
    """Base of all feeds, cached, in memory or streamed: position, saved states, augmentation, delivery and reading ahead."""

    only_copies = False
    """Whether a group of batches is only copied rows, which may not be worth a thread."""

    def __init__(self, schema: FeedSchema, split: Split, content: str, order: Order, part: FeedShare) -> None:
        self.schema = schema
        self.order = order
        self.part = part.checked()
        self._state = FeedState(
            fingerprint=order.fingerprint, batch_rows=part.batch_rows, split=split, rows=part.positions(order.epoch_rows),
            content=content, seed=order.seed, shuffle=order.mode, epoch=0, position=0,
        )  # fmt: skip
        self._at = 0, 0
        self._augment: Augment | None = None
        self._augment_seed = 0
        self._delivery: Delivery | None = None
        self._process = os.getpid()

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, all ranks together."""
        return self._state.rows

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch from position `start` (rows consumed by all ranks) to its end.

        A thread gathers ahead if that saves time; closing or dropping the iterator stops it.

        Raises:
            DataError: a stream has other rows than the order.
        """
        self._check_start(epoch, start)
        if start < self.num_rows:
            yield from self._read_ahead(epoch, self._groups(epoch, start))

    def _groups(self, epoch: int, start: int) -> Generator[list[Batch]]:
        """Make batches from position `start` on, some at a time."""
        raise NotImplementedError(f"{type(self).__name__} has no `_groups`")

    def augment_with(self, augment: Augment, seed: int) -> None:
        """Change every batch read from now on, in the thread that reads ahead. `augment` keeps the number and order of rows.

        Its generator's numbers follow from (seed, epoch, row), or from (seed, epoch, position) if rows are drawn (a sample, a
        mixture): they are the same after a resume and on any rank. Rows that `last="fill"` adds get the same numbers as
        before. A batch without rows on this rank is not augmented.
        """
        self._augment, self._augment_seed = augment, seed
        self._state = self._state.model_copy(update={"augment_seed": seed})

    def deliver_to(self, device: torch.device | str) -> None:
        """Put every batch read from now on on `device`, after augmentation. Raises SpecError if it does not exist."""
        delivery = Delivery(device)
        self._delivery = None if delivery.device.type == "cpu" else delivery

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch yielded last (or the loaded one), as JSON values, without rows read ahead."""
        epoch, position = self._at
        return self._state.model_copy(update={"epoch": epoch, "position": position}).model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Load a saved state and return (epoch, position) to continue at.

        Raises:
            ResumeError: the state is of another dataset, order, seed, batch size or split, or of a newer version.
        """
        try:
            saved = FeedState.model_validate(state if not isinstance(state, Mapping) else dict(state))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ResumeError(f"the feed's saved state cannot be read: {where}: {first['msg']}", next_step=_FRESH) from error
        problems = [
            f"{label}: {getattr(saved, name)} in the checkpoint, {getattr(self._state, name)} now"
            for name, label in _MUST_MATCH.items()
            if getattr(saved, name) != getattr(self._state, name)
        ]
        if problems:
            raise ResumeError("the checkpoint belongs to other data or another order", problems=problems, next_step=_FRESH)
        if saved.position > saved.rows:
            raise ResumeError(f"the checkpoint's position {saved.position} is beyond the split's {saved.rows} rows")
        if self.order.by_length is None and saved.position % saved.batch_rows and saved.position != saved.rows:
            raise ResumeError(
                f"the checkpoint's position {saved.position} is within a step: they begin at multiples of "
                f"batch_rows={saved.batch_rows}",
                next_step=_FRESH,
            )
        self._at = saved.epoch, saved.position
        return self._at

    def _read_ahead(self, epoch: int, groups: Generator[list[Batch]]) -> Iterator[Batch]:
        """Make groups of batches ahead in a thread; the position follows the yielded batches."""
        once_it_pays = self.only_copies and self._augment is None and self._delivery is None
        if self._augment is not None:
            groups = self._augmented_groups(epoch, groups)
        with closing(ahead(self._delivered(groups), self.part.prefetch, once_it_pays=once_it_pays)) as ready:
            for group, copies in ready:
                for batch in group:
                    if copies is not None:
                        wait_for(copies, batch.columns.values())
                    self._at = epoch, batch.position
                    yield batch

    def _augmented_groups(self, epoch: int, groups: Generator[list[Batch]]) -> Generator[list[Batch]]:
        """Yield each augmented batch alone, so that it need not wait for the batches after it."""
        with closing(groups):  # also if `augment` fails: the traceback would keep them open
            for group in groups:
                for batch in group:
                    yield [self._augmented(epoch, batch)]

    def _delivered(self, groups: Generator[list[Batch]]) -> Generator[tuple[list[Batch], torch.cuda.Event | None]]:
        """Start the copies of each group to the device."""
        with closing(groups):
            for group in groups:
                if self._delivery is None:
                    yield group, None
                else:
                    with phase("copy"):
                        columns, copies = self._delivery.send([batch.columns for batch in group])
                    yield [batch._replace(columns=own) for batch, own in zip(group, columns, strict=True)], copies

    def _augmented(self, epoch: int, batch: Batch) -> Batch:
        if self._augment is None or not batch.rows:
            return batch
        positions = np.arange(batch.first_row, batch.first_row + batch.rows)
        row_keys = positions if self.order.is_drawn else batch.row_ids
        with self._delivery.as_current_device() if self._delivery is not None else nullcontext(), phase("augment"):
            columns = self._augment(batch.columns, RowGenerator(self._augment_seed, epoch, row_keys))
        check_augmented(columns, batch.rows, self.schema.packed)
        return batch._replace(columns=dict(columns))

    def _check_start(self, epoch: int, start: int) -> None:
        if os.getpid() != self._process:  # a fork copies no threads, and locks in any state
            raise SpecError(
                "a feed was opened in another process and is read after a fork",
                next_step="call open_feed in the process that reads the feed",
            )
        if epoch < 0:
            raise ValueError(f"epoch {epoch} is below 0")
        if not 0 <= start <= self.num_rows:
            raise ValueError(f"position {start} of epoch {epoch} is not within the epoch's {self.num_rows} rows")


def check_augmented(columns: Mapping[str, Any], rows: int, packed: Collection[str] = ()) -> None:
    """Raise SpecError unless every column is a tensor of `rows` rows, or a column of `packed` with its offsets."""
    if not isinstance(columns, Mapping):
        raise SpecError(
            f"augment returned a {type(columns).__name__}, not a dict of columns",
            next_step="end it with `return` and the batch",
        )
    of_lists = {*packed, *(f"{name}_offsets" for name in packed)}
    for name, column in columns.items():
        if name in of_lists and isinstance(column, torch.Tensor):
            continue
        if not isinstance(column, torch.Tensor) or column.shape[:1] != (rows,):
            found = (
                f"a tensor of shape {list(column.shape)}" if isinstance(column, torch.Tensor) else f"a {type(column).__name__}"
            )
            raise SpecError(
                f"augment returned {found} for column {name!r} in a batch of {rows} rows; the first dimension must be {rows}"
            )
    problem = next(filter(None, (packed_problem(columns, name, rows) for name in packed)), None)
    if problem is not None:
        raise SpecError(f"augment returned a wrong batch of {rows} rows: {problem}")


_FRESH = "restore the data and options of the checkpoint, or start anew (pipeline: penstock run FILE --fresh)"

_MUST_MATCH = {
    "split": "split",
    "content": "content of the dataset (digest)",
    "rows": "rows of an epoch (data, sample, epoch_rows, last_batch)",
    "batch_rows": "batch_rows",
    "shuffle": "shuffle mode",
    "seed": "seed of the shuffle",
    "augment_seed": "seed of the augmentation",
    "fingerprint": "fingerprint of the order (lanes, window_rows, sample, by_length, shares of a mixture, a changed generator)",
}
