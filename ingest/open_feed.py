"""How does a program of your own read a dataset that penstock has prepared? By its address, in any training loop.

The same feed as `penstock run` uses: every row once an epoch (or in the shares that are asked for), in an order that depends
on the seed and the epoch alone, shared out over any number of ranks, and exact to continue from `state_dict()`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed
import torch.utils.data
from pydantic import ValidationError
from torch import Tensor

from penstock.errors import DataError, SpecError
from penstock.ingest.feed.batch import Augment, FeedShare, LastBatch
from penstock.ingest.feed.cached import CachedFeed, open_parts, shards_in
from penstock.ingest.feed.delivery import Scaling
from penstock.ingest.files.content_digests import content_digests
from penstock.ingest.manifest import DatasetManifest, ShardInfo, manifest_path
from penstock.ingest.schema import Split
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.shuffle.sampling import Mixture
from penstock.ingest.spec import LengthSpec, SampleSpec, ShuffleSpec
from penstock.storage import Storage

__all__ = ["FeedDataset", "open_feed"]


def open_feed(
    dataset: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, float],
    split: Split = "train",
    *,
    batch_rows: int,
    shuffle: Literal["none", "windowed", "global"] = "global",
    seed: int = 0,
    window_rows: int = 1 << 18,
    window_of: Literal["rows", "shards"] = "rows",
    sample: SampleSpec | Mapping[str, Any] | None = None,
    by_length: LengthSpec | Mapping[str, Any] | None = None,
    mix: Literal["shares", "epochs"] = "shares",
    temperature: float = 1.0,
    epoch_rows: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    columns: Sequence[str] | None = None,
    augment: Augment | None = None,
    device: torch.device | str = "cpu",
    as_float: Mapping[str, Scaling] | None = None,
    prefetch: int = 2,
    last: LastBatch = "keep",
    verify: bool = True,
) -> CachedFeed:
    """Open one split of a cached dataset for this rank.

    Args:
        dataset: its address, `<storage>/datasets/<key>`: a path or an fsspec URL. MLflow has it as the tag
            `penstock.data.uri` of a registered model; the key is that of the materialize stage in `penstock plan --json`. Or
            several of the same columns: `{address: 3, other: 1}` says of each what `mix` makes of it, `[address, other]` leaves
            that to `temperature`.
        split: train, validation or test.
        batch_rows: rows of one step over all ranks.
        shuffle: order of the rows; see `shuffle.mode` in docs/spec.md.
        seed: of the order and of `augment`.
        window_rows: see `shuffle.window_rows`.
        window_of: see `shuffle.window_of`.
        sample: draw rows in other shares, such as `{"balance": "label"}`; see `shuffle.sample`.
        by_length: put rows of like length into a step, such as `{"column": "tokens"}`; see `shuffle.by_length`.
        mix: what the numbers beside several datasets are. `shares`: of the rows that are drawn, whatever a dataset has.
            `epochs`: how often its rows come in one epoch, 0.5 for half of them.
        temperature: of several datasets without numbers: each is drawn from in proportion to its rows to the power of
            1 / temperature. 1 leaves them as they are, infinity makes them equal.
        epoch_rows: rows of an epoch where several datasets are mixed; None takes as many as they have in all.
        rank: which part of every step's rows; None asks torch.distributed, and takes 0 where that is not initialised.
        world_size: number of parts; None as for `rank`.
        columns: only these, in this order; None takes all.
        augment: changes each batch in the thread that reads ahead: `augment(columns, generator)` gives the columns back, and
            takes chance from the generator (`random`, `normal`, `integers`), so that it is exact to continue.
        device: where batches are put. For a GPU ("cuda") rows are gathered into pinned memory, and the thread that reads ahead
            copies them on a stream of its own while the GPU works on the batches before.
        as_float: columns that become float32 on that device, after `augment`: `{"image": (scale, shift)}` makes
            `values * scale + shift`. Numbers, or lists that broadcast over a row's shape from its last dimension on.
        prefetch: groups of batches made ahead in a thread; 0 uses none. Where nothing but rows is read (no `augment`, `device`,
            `as_float`) the thread is started once it saves time.
        last: what becomes of an epoch's last batch where the rows do not fill it: `keep` makes it shorter, `drop` leaves its
            rows out of the epoch, `fill` adds the epoch's first rows.
        verify: read shards on local disks through and compare their hashes, once per machine and after a change. (Those of a
            store always are, when they are fetched.)

    Raises:
        DataError: there is no such dataset or split, a shard is missing or damaged, or several datasets differ in columns or
            classes.
        ServiceError: its store does not answer.
        PreflightError: a global order of more bytes than the node's cache may hold, or of more files than a process may open.
        SpecError: an unknown column, a device that is not there, numbers that make no sense, or only one of `rank` and
            `world_size` is given.
    """
    if isinstance(dataset, os.PathLike):
        dataset = os.fspath(dataset)
    addresses = [dataset] if isinstance(dataset, str) else [os.fspath(address) for address in dataset]
    if not addresses:
        raise SpecError("open_feed: no dataset is named")
    if epoch_rows is not None and isinstance(dataset, str):
        raise SpecError(f"open_feed: epoch_rows={epoch_rows} is for several datasets; for one give sample={{'rows': ...}}")
    if temperature != 1.0 and isinstance(dataset, str | Mapping):
        raise SpecError(f"open_feed: temperature={temperature} goes with a list of datasets, not with one or with given shares")
    if not temperature > 0:
        raise SpecError(f"open_feed: temperature={temperature} must be above 0")
    if columns is not None and (isinstance(columns, str) or not columns):
        raise SpecError(f"open_feed: columns={columns!r} is no list of names", next_step="name some, or leave it out for all")
    if augment is not None and not callable(augment):
        raise SpecError(f"open_feed: augment={augment!r} is no function")
    if mix not in ("shares", "epochs"):
        raise SpecError(f"open_feed: mix={mix!r} is neither 'shares' nor 'epochs'")
    if mix == "epochs" and epoch_rows is not None:
        raise SpecError(f"open_feed: epoch_rows={epoch_rows}, and mix='epochs' says itself how many rows an epoch has")
    if mix != "shares" and not isinstance(dataset, Mapping):
        raise SpecError(f"open_feed: mix={mix!r} goes with a number for each of several datasets, such as {{address: 2}}")
    if isinstance(dataset, Mapping):
        for address, number in dataset.items():
            if not number > 0:
                raise SpecError(f"open_feed: {number!r} beside {address!r} must be a number above 0")
    parts = [_find(address) for address in addresses]
    shards = [shard.rows for _, shard in shards_in(parts, split)]
    if (rank is None) != (world_size is None):
        raise SpecError(
            f"open_feed: rank={rank} with world_size={world_size}: one means nothing without the other",
            next_step="give both, or neither to ask torch.distributed",
        )
    if rank is None or world_size is None:
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if together else 0
        world_size = torch.distributed.get_world_size() if together else 1
    try:
        spec = ShuffleSpec.model_validate(
            {
                "mode": shuffle,
                "seed": seed,
                "window_rows": window_rows,
                "window_of": window_of,
                "sample": sample,
                "by_length": by_length,
            }
        )
        mixture = None
        if not isinstance(dataset, str):
            rows = [manifest.rows[split] for _, manifest in parts]
            if not isinstance(dataset, Mapping):
                shares = [count ** (1 / temperature) for count in rows]
            elif mix == "epochs":
                shares = [count * epochs for count, epochs in zip(rows, dataset.values(), strict=True)]
                if not math.isfinite(sum(shares)):
                    raise OverflowError("epochs must be finite")
                epoch_rows = round(sum(shares))
            else:
                shares = list(dataset.values())
            mixture = Mixture.model_validate({"sources": list(zip(rows, shares, strict=True)), "rows": epoch_rows})
    except OverflowError as error:
        raise SpecError(f"open_feed: no mixture comes of {dataset!r} and temperature={temperature}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        named = ["shuffle" if name == "mode" else str(name) for name in first["loc"]]  # a pipeline file's key, as it is here
        where = f"{'.'.join(named)}={first['input']!r}: " if named else ""
        raise SpecError(
            f"open_feed: {where}{first['msg'].removeprefix('Value error, ').replace('mode: global', 'shuffle=global')}",
            next_step="correct the argument; help(open_feed) says what each one takes",
        ) from error
    if mixture is not None and (spec.mode != "global" or spec.sample is not None):
        raise SpecError(
            "open_feed: several datasets cannot be mixed with "
            + ("a sample" if spec.sample is not None else f"shuffle={spec.mode!r}, only with 'global'"),
            next_step="leave it out, or open one dataset",
        )
    order = make_order(spec, sum(shards), shards).model_copy(update={"mixture": mixture})
    part = FeedShare(batch_rows, rank, world_size, prefetch, last)
    try:
        feed = open_parts(parts, split, order=order, part=part.checked(), columns=columns)
    except (KeyError, ValueError) as error:
        raise SpecError(f"open_feed: {error.args[0] if error.args else error}") from error
    if verify:
        _refuse_damaged(shards_in(parts, split))
    if augment is not None:
        feed.augment_with(augment, seed)
    feed.deliver_to(device, as_float)
    return feed


def _refuse_damaged(places: Sequence[tuple[Storage, ShardInfo]]) -> None:
    local = [(storage.local_path(shard.path), shard) for storage, shard in places if storage.is_local]
    found = content_digests([str(path) for path, _ in local])
    damaged = [str(path) for (path, shard), digest in zip(local, found, strict=True) if digest != shard.digest]
    if damaged:
        raise DataError(
            f"{len(damaged)} of the dataset's {len(places)} shards have another content than their manifest says",
            problems=damaged,
            next_step="run the pipeline again: the materialize stage prepares their rows again",
        )


def _find(dataset: str) -> tuple[Storage, DatasetManifest]:
    root, found, key = dataset.rstrip("/").rpartition("/datasets/")
    if not found:
        raise DataError(
            f"{dataset!r} is no address of a dataset, which ends with /datasets/<key>",
            next_step="take the tag penstock.data.uri from MLflow, or list the folder datasets/ of the storage",
        )
    storage = Storage(root)
    try:
        return storage, DatasetManifest.model_validate(storage.read_json(manifest_path(key)))
    except FileNotFoundError as error:
        known = storage.list("datasets")
        raise DataError(
            f"there is no dataset at {dataset}", next_step=f"datasets of that storage: {', '.join(known) or 'none'}"
        ) from error
    except ValueError as error:
        raise DataError(f"{dataset}/manifest.json is no manifest: {error}") from error


class FeedDataset(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """A feed for code that insists on a DataLoader: one item is one batch, so give it `batch_size=None, num_workers=0`.

    Iterating reads one epoch, and the next time the next one, also if the loop was left early. After `load_state_dict` it goes
    on where the state was taken: for a loop that leaves every epoch early, as under Lightning's `limit_train_batches`, that is
    inside the epoch, unless `max_batches` says that the epoch ended there.

    Args:
        feed: what is read.
        max_batches: an epoch ends after so many batches; None for all of them.

    Attributes:
        epoch: which one is read next.

    Raises:
        SpecError: `max_batches` is below 1, or batches hang on the rows' lengths (`by_length` with `batch_entries`).
    """

    def __init__(self, feed: CachedFeed, max_batches: int | None = None) -> None:
        super().__init__()
        self.feed = feed
        self.epoch = 0
        self._start = 0
        self._reading = False
        self._end = feed.num_rows
        if max_batches is not None:
            if max_batches < 1 or self._batches_differ:
                raise SpecError(
                    f"FeedDataset: max_batches={max_batches} must be 1 or more, and goes with batches of equal rows"
                )
            self._end = min(self._end, max_batches * feed.part.batch_rows)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches as {column name: tensor [rows, *shape]}.

        Raises:
            SpecError: in a worker process of a DataLoader, where every worker would read everything.
        """
        if torch.utils.data.get_worker_info() is not None:
            raise SpecError("a FeedDataset reads ahead in a thread of its own", next_step="DataLoader(..., num_workers=0)")
        epoch, start = self.epoch, self._start
        self.epoch, self._start = epoch + 1, 0  # at once: whoever stops early reads the next epoch next time, too
        for batch in self.feed.batches(epoch, start):
            self._reading = True
            yield batch.columns
            if batch.position >= self._end:
                return

    def __len__(self) -> int:
        """Batches of an epoch. Raises TypeError where that hangs on the rows (`by_length` with `batch_entries`)."""
        if self._batches_differ:
            raise TypeError("the number of batches hangs on the rows' lengths")
        return -(-self._end // self.feed.part.batch_rows)

    @property
    def _batches_differ(self) -> bool:
        by_length = self.feed.order.by_length
        return by_length is not None and by_length.batch_entries is not None

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` at its first row."""
        self.epoch, self._start, self._reading = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where the batch yielded last leaves the feed, as JSON values; the same on every rank."""
        return self.feed.state_dict() | ({} if self._reading else {"epoch": self.epoch, "position": self._start})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, also with another number of ranks.

        Raises:
            ResumeError: the state is of another dataset, order or batch size.
        """
        self.epoch, self._start = self.feed.load_state_dict(state)
        self._reading = False
        if self._start >= self._end:
            self.set_epoch(self.epoch + 1)
