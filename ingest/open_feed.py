"""How does a program of your own read a dataset that penstock has prepared? By its address, in any training loop.

It is the feed of `penstock run`: every row once an epoch (or in given shares), in an order that depends only on the seed and
the epoch (and on the shards, which are dealt to lanes), divided over any number of ranks, with exact resume from
`state_dict()`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch.utils.data
from pydantic import ValidationError
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from penstock.errors import DataError, ShardError, SpecError
from penstock.ingest.feed.cached import CachedFeed, open_cached_feed, shards_in
from penstock.ingest.feed.mapped_shards import ShardPlaces
from penstock.ingest.feed.options import FeedOptions, spec_error
from penstock.ingest.files.content_digests import content_digests
from penstock.ingest.manifest import MANIFEST_VERSION, DatasetManifest, manifest_path
from penstock.ingest.schema import Split
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.shuffle.sampling import Mixture
from penstock.storage import Storage

__all__ = ["FeedDataset", "open_feed"]


def open_feed(
    dataset: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, float],
    split: Split = "train",
    **options: Any,
) -> CachedFeed:
    """Open one split of a cached dataset for this rank: `open_feed(address, "train", batch_rows=256, seed=17)`.

    Args:
        dataset: its address, `<storage>/datasets/<key>`: a path or an fsspec URL, such as the tag `penstock.data.uri` of a run
            in MLflow. Or several datasets with the same columns: `{address: 3, other: 1}` draws three rows of
            the first to one of the second, `[address, other]` in proportion to their rows.
        split: train, validation or test.
        options: `batch_rows`, and any other field of `FeedOptions`, which explains them.

    Raises:
        DataError: the dataset or split does not exist, a shard is missing or damaged, or several datasets differ in columns or
            classes.
        ServiceError: its store does not answer.
        PreflightError: a global order needs more bytes than the node's cache may hold, or more files than a process may open.
        SpecError: an unknown column or device, an invalid number, or only one of `rank` and `world_size`.
    """
    chosen = FeedOptions.named(options)
    if isinstance(dataset, os.PathLike):
        dataset = os.fspath(dataset)
    _check_together(dataset, chosen)
    addresses = [dataset] if isinstance(dataset, str) else [os.fspath(address) for address in dataset]
    parts = [_find(address) for address in addresses]
    places = shards_in(parts, split)
    spec = chosen.shuffle_spec()
    mixture = None
    if not isinstance(dataset, str):
        mixture = _mixture(dataset, [manifest.rows[split] for _, manifest in parts], chosen)
        if spec.mode != "global" or spec.sample is not None or spec.lanes not in ("auto", 1):
            beside = "a sample" if spec.sample is not None else f"lanes={spec.lanes}, as each rank draws from all shards"
            raise SpecError(
                "open_feed: several datasets cannot be mixed with "
                + (f"shuffle={spec.mode!r}, only with 'global'" if spec.mode != "global" else beside),
                next_step="omit it, or open one dataset",
            )
    dealt = places.rows if mixture is None else ()
    order = make_order(spec, int(places.rows.sum()), dealt, chosen.batch_rows).model_copy(update={"mixture": mixture})
    try:
        feed = open_cached_feed(parts, split, order=order, columns=chosen.columns, **chosen.share()._asdict())
    except (KeyError, ValueError) as error:
        raise SpecError(f"open_feed: {error.args[0] if error.args else error}") from error
    if chosen.verify:
        _check_content(places)
    if chosen.augment is not None:
        feed.augment_with(chosen.augment, chosen.seed)
    feed.deliver_to(chosen.device)
    return feed


def _check_together(dataset: str | Sequence[Any] | Mapping[str, float], options: FeedOptions) -> None:
    """Raise SpecError for options that cannot be used with one dataset, or with several."""
    epoch_rows = options.epoch_rows
    if not dataset:
        raise SpecError("open_feed: no dataset is named")
    if epoch_rows is not None and isinstance(dataset, str):
        raise SpecError(f"open_feed: epoch_rows={epoch_rows} is for several datasets; for one use sample={{'rows': ...}}")
    if isinstance(dataset, Mapping):
        for address, number in dataset.items():
            if not number > 0:
                raise SpecError(f"open_feed: {number!r} beside {address!r} must be a number above 0")


def _mixture(dataset: Sequence[Any] | Mapping[str, float], rows: Sequence[int], options: FeedOptions) -> Mixture:
    """Compute the shares of several datasets, which have `rows` rows."""
    shares = list(dataset.values()) if isinstance(dataset, Mapping) else rows
    try:
        return Mixture.model_validate({"sources": list(zip(rows, shares, strict=True)), "rows": options.epoch_rows})
    except ValidationError as error:
        raise spec_error(error) from error


def _check_content(places: ShardPlaces) -> None:
    local = [
        (storage.local_path(shard.path), shard) for storage, shards in places.parts if storage.is_local for shard in shards
    ]
    found = content_digests([str(path) for path, _ in local])
    damaged = [str(path) for (path, shard), digest in zip(local, found, strict=True) if digest != shard.digest]
    if damaged:
        raise ShardError(
            f"{len(damaged)} of the dataset's {len(places)} shards have another content than in their manifest",
            problems=damaged,
        )


def _find(dataset: str) -> tuple[Storage, DatasetManifest]:
    root, found, key = dataset.rstrip("/").rpartition("/datasets/")
    if not found:
        raise DataError(
            f"{dataset!r} is not the address of a dataset, which ends with /datasets/<key>",
            next_step="copy the tag penstock.data.uri from MLflow, or list the folder datasets/ of the storage",
        )
    storage = Storage(root)
    try:
        found = storage.read_json(manifest_path(key))
        version = found.get("version") if isinstance(found, dict) else None
        if isinstance(version, int) and version != MANIFEST_VERSION:
            raise DataError(
                f"the manifest of {dataset} has version {version}, and this penstock reads version {MANIFEST_VERSION}",
                next_step="run its pipeline again: the manifest is written anew, and the prepared rows are kept",
            )
        return storage, DatasetManifest.model_validate(found).opened(storage)
    except FileNotFoundError as error:
        known = storage.list("datasets")
        raise DataError(
            f"there is no dataset at {dataset}", next_step=f"datasets of that storage: {', '.join(known) or 'none'}"
        ) from error
    except ValueError as error:
        raise DataError(f"{dataset}/manifest.json is not a manifest: {error}") from error


class _WholeBatch(dict[str, Tensor]):
    """A batch that a DataLoader must not stack with others."""


def _refuse_stacking(*_: Any, **__: Any) -> NoReturn:
    raise SpecError(
        "an item of a FeedDataset is a whole batch, and the DataLoader would stack several",
        next_step="DataLoader(dataset, batch_size=None, num_workers=0); rows per batch: open_feed(..., batch_rows=...)",
    )


default_collate_fn_map[_WholeBatch] = _refuse_stacking


class FeedDataset(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """A feed for code that needs a DataLoader: one item is one batch, so use `batch_size=None, num_workers=0`.

    Each iteration reads one epoch and the next iteration the next epoch, also if the loop was left early. After
    `load_state_dict` it continues at the position of the state. For a loop that leaves every epoch early, as under Lightning's
    `limit_train_batches`, that is inside the epoch, unless `max_batches` ends the epoch there.

    Args:
        feed: to read.
        max_batches: batches of an epoch; None for all.

    Attributes:
        epoch: the next epoch to read.

    Raises:
        SpecError: a column is not numbers, `max_batches` is below 1, or batches depend on the rows' lengths (`by_length` with
            `batch_entries`).
    """

    def __init__(self, feed: CachedFeed, max_batches: int | None = None) -> None:
        super().__init__()
        arrow = [str(column) for column in feed.schema.columns if column.arrow]
        if arrow:
            raise SpecError(
                f"FeedDataset: tensors cannot hold {', '.join(arrow)}",
                next_step="read only others, open_feed(..., columns=[...]), or take `batch.arrow` of feed.batches()",
            )
        self.feed = feed
        self.epoch = 0
        self._start = 0
        self._reading = False
        self._end = feed.num_rows
        if max_batches is not None:
            if max_batches < 1 or self._batches_differ:
                raise SpecError(f"FeedDataset: max_batches={max_batches} must be 1 or more, and needs batches of equal rows")
            self._end = min(self._end, max_batches * feed.part.batch_rows)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches as {column name: tensor [rows, *shape]}.

        Raises:
            SpecError: in a worker process of a DataLoader: every worker would read all rows.
        """
        if torch.utils.data.get_worker_info() is not None:
            raise SpecError("a FeedDataset cannot be read in worker processes", next_step="DataLoader(..., num_workers=0)")
        epoch, start = self.epoch, self._start
        self.epoch, self._start = epoch + 1, 0  # at once, also for a loop that stops early
        for batch in self.feed.batches(epoch, start):
            self._reading = True
            yield _WholeBatch(batch.columns)
            if batch.position >= self._end:
                return

    def __len__(self) -> int:
        """Return the batches of an epoch. Raises TypeError if it depends on the rows (`by_length` with `batch_entries`)."""
        if self._batches_differ:
            raise TypeError("the number of batches depends on the rows' lengths")
        return -(-self._end // self.feed.part.batch_rows)

    @property
    def _batches_differ(self) -> bool:
        by_length = self.feed.order.by_length
        return by_length is not None and by_length.batch_entries is not None

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` at its first row."""
        self.epoch, self._start, self._reading = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the batch yielded last, as JSON values; the same on every rank."""
        return self.feed.state_dict() | ({} if self._reading else {"epoch": self.epoch, "position": self._start})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state`, also with another number of ranks.

        Raises:
            ResumeError: the state is of another dataset, order or batch size.
        """
        self.epoch, self._start = self.feed.load_state_dict(state)
        self._reading = False
        if self._start >= self._end:
            self.set_epoch(self.epoch + 1)
