"""What does a training worker read? Its share of each global batch, found by arithmetic and gathered ahead of need.

The global batch at position p of an epoch holds the rows `order.ids(epoch, p, p + batch_rows)`, or those drawn there; rank r
of W takes the contiguous part [r*b//W, (r+1)*b//W) of its b rows. A feed's state is therefore (epoch, rows consumed by all
ranks), and world size is no part of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from ingest.by_length import Pools, find_column
from ingest.dataset import SPLITS, ColumnInfo, DatasetManifest, FeedSchema, ShardInfo
from ingest.gather import Rows
from ingest.list_batches import cut_lists, packed_problem
from ingest.order import Order
from ingest.prefetch import ahead
from ingest.row_generator import RowGenerator
from ingest.sampling import check_column, make_draws, mixed_draws
from ingest.shard_rows import shard_rows
from penstock.config import Section
from penstock.digest import digest_of
from penstock.errors import DataError, ResumeError, SpecError
from penstock.storage import Storage

__all__ = [
    "Augment",
    "Batch",
    "CachedFeed",
    "Feed",
    "FeedShare",
    "FeedState",
    "LastBatch",
    "check_augmented",
    "open_feed",
    "open_parts",
    "select_columns",
    "shards_in",
    "share",
]

GROUP_BYTES = 4 << 20
"""About how much is gathered and handed over at once: a hand-over between threads costs more than a small batch's gather."""

MAX_GROUP_BATCHES = 64

Split = Literal["train", "validation", "test"]
LastBatch = Literal["keep", "drop", "fill"]
"""`keep` leaves the last global batch shorter, `drop` leaves its rows out of the epoch, `fill` adds the epoch's first rows."""
IdsAt = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]
"""(epoch, ascending positions) -> row ids."""
Augment = Callable[[dict[str, torch.Tensor], RowGenerator], Mapping[str, torch.Tensor]]
"""Changes the columns of one batch, with the numbers that its rows draw."""


class Batch(NamedTuple):
    """One rank's share of a global batch. The tensors are the caller's to keep and to change."""

    columns: dict[str, torch.Tensor]
    """Column name to tensor [rows, *shape], in the stored dtype; lists as `ColumnInfo.ragged` says."""
    row_ids: NDArray[np.int64]
    """Shape [rows]: number of each row in its split."""
    rows: int
    """Rows of this rank's share; 0 when the global batch is smaller than the world."""
    global_rows: int
    """Rows of the global batch."""
    first_row: int
    """Position in the epoch of this share's first row."""
    position: int
    """Rows consumed by all ranks in this epoch once this batch is done."""


class Feed(Protocol):
    """Anything a training loop can read: cached, in memory, or streamed."""

    @property
    def schema(self) -> FeedSchema:
        """Columns of the batches."""

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, all ranks together: those of the split, unless rows are sampled."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch from position `start` (rows consumed by all ranks) to its end."""

    def augment_with(self, augment: Augment, seed: int) -> None:
        """Change every batch that is read from now on."""

    def state_dict(self) -> dict[str, Any]:
        """Where the batch yielded last leaves the feed, as JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Take over a saved state; returns (epoch, position) to pass to `batches`."""


class FeedState(Section):
    """Where a feed is, and what it reads: enough to refuse to go on with something else."""

    version: Literal[1] = 1
    fingerprint: str
    """Of the order: its parameters and ids really generated."""
    epoch: NonNegativeInt = 0
    position: NonNegativeInt = 0
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
    """None where nothing is augmented."""


class FeedShare(NamedTuple):
    """Which part of every global batch is read, and how far ahead."""

    batch_rows: int
    """Rows of the global batch."""
    rank: int = 0
    world_size: int = 1
    prefetch: int = 2
    """Groups of batches gathered ahead in a thread; 0 gathers when asked."""
    last: LastBatch = "keep"
    """What becomes of an epoch's last global batch where the rows do not fill it."""

    def checked(self) -> FeedShare:
        """Itself. Raises ValueError for numbers that make no sense."""
        if self.batch_rows < 1 or not 0 <= self.rank < self.world_size or self.prefetch < 0:
            raise ValueError(f"no feed can have {self}: batch_rows >= 1, 0 <= rank < world_size and prefetch >= 0 must hold")
        if self.last not in get_args(LastBatch):
            raise ValueError(f"last={self.last!r} is none of {', '.join(get_args(LastBatch))}")
        return self

    def positions(self, epoch_rows: int) -> int:
        """Positions of an epoch of so many rows: fewer with `drop`, more with `fill`. Raises SpecError where none is left."""
        if self.last == "keep" or epoch_rows % self.batch_rows == 0:
            return epoch_rows
        if self.last == "drop" and epoch_rows < self.batch_rows:
            raise SpecError(
                f"{epoch_rows} rows hold no batch of {self.batch_rows}, and the last one is dropped (train.last_batch)",
                next_step=f"take batches of at most {epoch_rows} rows, or keep the last one",
            )
        return (epoch_rows // self.batch_rows + (self.last == "fill")) * self.batch_rows


def share(global_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """The contiguous part [low, high) of a global batch that `rank` takes; the parts of all ranks make up the whole."""
    return rank * global_rows // world_size, (rank + 1) * global_rows // world_size


class FeedCursor:
    """The part of a feed that knows where it is, and which saved states it may continue."""

    def __init__(self, schema: FeedSchema, split: Split, content: str, order: Order, part: FeedShare) -> None:
        self.schema = schema
        self.order = order
        self.part = part.checked()
        self._state = FeedState(
            fingerprint=order.fingerprint, batch_rows=part.batch_rows, split=split, rows=part.positions(order.epoch_rows),
            content=content, seed=order.seed, shuffle=order.mode,
        )  # fmt: skip
        self._at = 0, 0
        self._augment: Augment | None = None
        self._augment_seed = 0

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, all ranks together."""
        return self._state.rows

    def augment_with(self, augment: Augment, seed: int) -> None:
        """Change every batch that is read from now on, in the thread that reads ahead. Rows stay as many and where they are.

        What `augment` draws from its generator follows from (seed, epoch, row), or from (seed, epoch, position) where an epoch
        may hold a row more than once: the same after a resume and on any rank.
        """
        self._augment, self._augment_seed = augment, seed
        self._state = self._state.model_copy(update={"augment_seed": seed})

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch yielded last (or the one loaded), as JSON values. Rows gathered ahead do not count."""
        epoch, position = self._at
        return self._state.model_copy(update={"epoch": epoch, "position": position}).model_dump()

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[int, int]:
        """Take over a saved state and return (epoch, position) to continue at.

        Raises:
            ResumeError: the state is of another dataset, order, seed, batch size or split, or of a newer version.
        """
        try:
            saved = FeedState.model_validate(dict(state))
        except ValidationError as error:
            raise ResumeError(f"the feed's saved state cannot be read: {error}", next_step=_FRESH) from error
        problems = [
            f"{label}: {getattr(saved, name)} in the checkpoint, {getattr(self._state, name)} now"
            for name, label in _MUST_MATCH.items()
            if getattr(saved, name) != getattr(self._state, name)
        ]
        if problems:
            raise ResumeError("the checkpoint was made while reading something else", problems=problems, next_step=_FRESH)
        if saved.position > saved.rows:
            raise ResumeError(f"the checkpoint's position {saved.position} lies beyond the split's {saved.rows} rows")
        self._at = saved.epoch, saved.position
        return self._at

    def _handed_over(self, epoch: int, groups: Iterator[list[Batch]]) -> Iterator[Batch]:
        """Make groups of batches ahead in a thread, and let the position follow what is yielded, not what is made."""
        if self._augment is not None:  # one by one: what is ready is not held back by those after it
            groups = ([self._augmented(epoch, batch)] for group in groups for batch in group)
        with closing(ahead(groups, self.part.prefetch)) as ready:
            for group in ready:
                for batch in group:
                    self._at = epoch, batch.position
                    yield batch

    def _augmented(self, epoch: int, batch: Batch) -> Batch:
        if self._augment is None or not batch.rows:
            return batch
        positions = np.arange(batch.first_row, batch.first_row + batch.rows)
        told_apart = positions if self.order.is_drawn else batch.row_ids
        columns = self._augment(batch.columns, RowGenerator(self._augment_seed, epoch, told_apart))
        check_augmented(columns, batch.rows, self.schema.packed)
        return batch._replace(columns=dict(columns))

    def _check_start(self, epoch: int, start: int) -> None:
        if epoch < 0 or not 0 <= start <= self.num_rows:
            raise ValueError(f"position {start} of epoch {epoch} is not within the split's {self.num_rows} rows")


def check_augmented(columns: Mapping[str, Any], rows: int, packed: Collection[str] = ()) -> None:
    """Raise SpecError unless every column is a tensor of `rows` rows, or one of `packed` with its offsets."""
    if not isinstance(columns, Mapping):
        raise SpecError(
            f"augment returned a {type(columns).__name__}, not a dict of columns",
            next_step="end it with `return` and the batch",
        )
    apart = {*packed, *(f"{name}_offsets" for name in packed)}
    for name, column in columns.items():
        if name in apart and isinstance(column, torch.Tensor):
            continue
        if not isinstance(column, torch.Tensor) or column.shape[:1] != (rows,):
            found = (
                f"a tensor of shape {list(column.shape)}" if isinstance(column, torch.Tensor) else f"a {type(column).__name__}"
            )
            raise SpecError(
                f"augment made {found} of column {name!r} in a batch of {rows} rows; rows come first, as many as before"
            )
    problem = next(filter(None, (packed_problem(columns, name, rows) for name in packed)), None)
    if problem is not None:
        raise SpecError(f"augment broke a batch of {rows} rows: {problem}")


_FRESH = "put the old value back, or start anew with `penstock run FILE --fresh`"

_MUST_MATCH = {
    "split": "split",
    "content": "content of the dataset (digest)",
    "rows": "rows of an epoch",
    "batch_rows": "train.batch_rows",
    "shuffle": "shuffle.mode",
    "seed": "shuffle.seed",
    "augment_seed": "seed of the augmentation",
    "fingerprint": "fingerprint of the order (shuffle.window_rows, sample, by_length, shares, or a changed generator)",
}


class CachedFeed(FeedCursor):
    """Reads rows that can be found by their number: mapped shards, or blocks in memory. Runs in a training worker."""

    def __init__(self, schema: FeedSchema, split: Split, content: str, rows: Rows, order: Order, part: FeedShare) -> None:
        if order.rows != rows.num_rows:
            raise ValueError(f"the order is made for {order.rows} rows, the {split} split has {rows.num_rows}")
        super().__init__(schema, split, content, order, part)
        self._rows = rows
        self._ids_at = order.ids_at
        if order.sample is not None:
            check_column(order.sample, schema.columns)
            self._ids_at = make_draws(order.sample, order.seed, rows.column(order.sample.column)).ids_at
        elif order.mixture is not None:
            self._ids_at = mixed_draws(order.mixture, order.seed).ids_at
        if part.last != "keep" and order.by_length is not None:
            raise ValueError(f"steps by length have no last batch to {part.last}")
        if self.num_rows > order.epoch_rows:
            self._ids_at = partial(_filled, self._ids_at, order.epoch_rows)
        self._drawn_at = self._ids_at
        self._pools: Pools | None = None
        if order.by_length is not None:
            column = find_column(order.by_length, schema.columns)
            self._pools = Pools(
                order.by_length,
                column,
                order.seed,
                self.num_rows,
                part.batch_rows,
                self._ids_at,
                partial(rows.lengths, column.name),
            )
            self._ids_at = self._pools.ids_at

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield this rank's batches of an epoch from position `start` on.

        A thread gathers ahead; closing or dropping the iterator stops it. An epoch can be read again, also from elsewhere.
        """
        self._check_start(epoch, start)
        yield from self._handed_over(epoch, self._groups(epoch, start))

    def _groups(self, epoch: int, start: int) -> Iterator[list[Batch]]:
        """Gather some batches with one call and cut them apart: the tensors of a group share one allocation."""
        announced = start if self._rows.ahead_rows else self.num_rows
        for cuts in self._cuts(epoch, start):
            while announced < min(cuts[-1][1] + self._rows.ahead_rows, self.num_rows):
                upto = min(announced + self._rows.ahead_rows, self.num_rows)
                # By the ids before they are put into steps by length, which open shards to find the lengths.
                self._rows.will_need(self._drawn_at(epoch, np.arange(announced, upto)), self._is_own(announced, upto))
                announced = upto
            shares = [share(stop - begin, self.part.rank, self.part.world_size) for begin, stop in cuts]
            own = [(begin + low, begin + high) for (begin, _), (low, high) in zip(cuts, shares, strict=True)]
            ids = self._ids_at(epoch, np.concatenate([np.arange(low, high) for low, high in own]))
            sizes = [high - low for low, high in own]
            columns = {name: tensor.split(sizes) for name, tensor in self._rows.take(ids).items()}
            lists = [cut_lists(self.schema[name], packed, sizes) for name, packed in self._rows.take_lists(ids).items()]
            group, taken = [], 0
            for index, ((begin, stop), (low, high)) in enumerate(zip(cuts, own, strict=True)):
                tensors = {name: parts[index] for name, parts in columns.items()}
                for cut in lists:
                    tensors.update(cut[index])
                group.append(Batch(tensors, ids[taken : taken + high - low], high - low, stop - begin, low, stop))
                taken += high - low
            yield group

    def _is_own(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which positions of [start, stop) this rank reads; all of them where steps differ in their rows."""
        if self._pools is not None or self.part.world_size == 1:
            return np.ones(stop - start, np.bool_)
        positions, batch_rows = np.arange(start, stop), self.part.batch_rows
        first = positions - positions % batch_rows
        rows = np.minimum(batch_rows, self.num_rows - first)
        low, high = rows * self.part.rank // self.part.world_size, rows * (self.part.rank + 1) // self.part.world_size
        return (positions - first >= low) & (positions - first < high)

    def _cuts(self, epoch: int, start: int) -> Iterator[list[tuple[int, int]]]:
        """First and end position of each global batch, as many of them at a time as are gathered with one call."""
        batch_rows = self.part.batch_rows
        local_bytes = max(1, batch_rows * self._rows.row_bytes // self.part.world_size)
        count = min(MAX_GROUP_BATCHES, max(1, GROUP_BYTES // local_bytes))
        if self._pools is not None:
            steps = self._pools.steps(epoch, start)
            while some := list(itertools.islice(steps, count)):
                yield some
            return
        for first in range(start, self.num_rows, batch_rows * count):
            stop = min(first + batch_rows * count, self.num_rows)
            yield [(begin, min(begin + batch_rows, stop)) for begin in range(first, stop, batch_rows)]


def _filled(ids_at: IdsAt, epoch_rows: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids at positions of which those from `epoch_rows` on begin the epoch again."""
    inside = positions < epoch_rows
    again = positions[~inside] % epoch_rows
    ids = ids_at(epoch, positions[inside])
    return np.concatenate([ids, ids_at(epoch, np.arange(again.max() + 1))[again]]) if len(again) else ids


def open_feed(
    storage: Storage,
    manifest: DatasetManifest,
    split: Split,
    *,
    batch_rows: int,
    order: Order,
    rank: int = 0,
    world_size: int = 1,
    columns: Sequence[str] | None = None,
    prefetch: int = 2,
    last: LastBatch = "keep",
) -> CachedFeed:
    """Open one split of a cached dataset for one rank. Shards of a remote storage are fetched into the node's cache.

    Args:
        batch_rows: rows of the global batch.
        columns: only these; None takes all. Provenance columns are never gathered.
        prefetch: groups of batches gathered ahead; 0 uses no thread.
        last: what becomes of an epoch's last batch where the rows do not fill it.

    Raises:
        DataError: no such split, or a local shard is missing or has another size than the manifest says.
        PreflightError: a global order of more bytes than the node's cache may hold.
        ValueError: an order made for another number of rows, or a rank outside the world.
    """
    part = FeedShare(batch_rows, rank, world_size, prefetch, last)
    return open_parts([(storage, manifest)], split, order=order, part=part, columns=columns)


def open_parts(
    parts: Sequence[tuple[Storage, DatasetManifest]],
    split: Split,
    *,
    order: Order,
    part: FeedShare,
    columns: Sequence[str] | None = None,
) -> CachedFeed:
    """Open one split of one or several datasets, whose rows count on from one to the next. See `open_feed`.

    Raises:
        DataError: also where the datasets' columns or classes differ.
    """
    places = shards_in(parts, split)
    schema = _common_schema([select_columns(manifest.feed_schema, columns) for _, manifest in parts])
    rows = shard_rows(places, schema.columns, order, part.rank, part.world_size)
    return CachedFeed(schema, split, digest_of([shard.digest for _, shard in places]), rows, order, part)


def shards_in(parts: Sequence[tuple[Storage, DatasetManifest]], split: Split) -> list[tuple[Storage, ShardInfo]]:
    """The shards of a split, of one dataset after the other, each with its storage. Raises DataError where there are none."""
    for _, manifest in parts:
        if not manifest.shards_of(split):
            there = [name for name in SPLITS if manifest.rows.get(name)]
            raise DataError(f"the dataset {manifest.key} has no rows in split {split!r}; it has {there}")
    return [(storage, shard) for storage, manifest in parts for shard in manifest.shards_of(split)]


def _common_schema(schemas: Sequence[FeedSchema]) -> FeedSchema:
    """The schema of all, with the most classes that one of them has."""
    first = schemas[0]
    for other in schemas[1:]:
        for name in ("columns", "label", "classes"):
            here, there = getattr(first, name), getattr(other, name)
            if here != there:
                raise DataError(
                    f"the datasets differ in their {name}: {_shown(here)} and {_shown(there)}",
                    next_step="prepare them with the same steps, or read only those `columns` that they have in common",
                )
    counts = [schema.num_classes for schema in schemas if schema.num_classes is not None]
    return first.model_copy(update={"num_classes": max(counts)}) if counts else first


def _shown(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], ColumnInfo):
        return ", ".join(map(str, value))
    return repr(value)


def select_columns(schema: FeedSchema, columns: Sequence[str] | None) -> FeedSchema:
    """The schema with only `columns`, in that order. Raises KeyError, naming those there are, for an unknown one."""
    return schema if columns is None else schema.model_copy(update={"columns": tuple(schema[name] for name in columns)})
