"""Which keyword arguments does `open_feed` take, with which defaults and checks?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.distributed
from pydantic import ValidationError

from penstock.errors import SpecError
from penstock.ingest.feed.batch import Augment, FeedShare, LastBatch
from penstock.ingest.spec import LengthSpec, SampleSpec, ShuffleSpec
from penstock.messages import did_you_mean

__all__ = ["FeedOptions", "spec_error"]


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """How `open_feed` reads.

    Attributes:
        batch_rows: rows of one step over all ranks.
        shuffle: order of the rows; see `shuffle.mode` in docs/spec.md.
        seed: of the order and of `augment`.
        window_rows: see `shuffle.window_rows`.
        window_of: see `shuffle.window_of`.
        lanes: parts that the rows are dealt to, so that each rank opens its own shards; see `shuffle.lanes`.
        sample: draw rows in other shares, such as `{"balance": "label"}`; see `shuffle.sample`.
        by_length: put rows of like length into a step, such as `{"column": "tokens"}`; see `shuffle.by_length`.
        epoch_rows: rows of an epoch of several datasets; None takes the sum of their rows.
        rank: part of every step's rows; None takes the rank of torch.distributed, or 0 if that is not initialised.
        world_size: number of parts; None as for `rank`.
        columns: only these, in this order; None reads all.
        augment: changes each batch in the thread that reads ahead: `augment(columns, generator)` returns the columns, and draws
            all random numbers from the generator (`random`, `normal`, `integers`), so that a resume is exact.
        device: of the batches. For a GPU ("cuda") rows are gathered into pinned memory, and the thread that reads ahead copies
            them on its own stream while the GPU works on earlier batches.
        prefetch: groups of batches made ahead in a thread; 0 uses none. Without `augment` and `device` the thread is started
            once it saves time.
        last: an epoch's last batch, if the rows do not fill it: `keep` makes it shorter, `drop` leaves its rows out of the
            epoch, `fill` adds the epoch's first rows.
        verify: read shards on local disks and compare their hashes, once per machine and after a change. (Shards of a store
            are always checked when they are fetched.)

    Raises:
        SpecError: a value is invalid, or two do not fit together.
    """

    batch_rows: int
    shuffle: Literal["none", "windowed", "global"] = "global"
    seed: int = 0
    window_rows: int = 1 << 18
    window_of: Literal["rows", "shards"] = "rows"
    lanes: int | Literal["auto"] = "auto"
    sample: SampleSpec | Mapping[str, Any] | None = None
    by_length: LengthSpec | Mapping[str, Any] | None = None
    epoch_rows: int | None = None
    rank: int | None = None
    world_size: int | None = None
    columns: Sequence[str] | None = None
    augment: Augment | None = None
    device: torch.device | str = "cpu"
    prefetch: int = 2
    last: LastBatch = "keep"
    verify: bool = True

    def __post_init__(self) -> None:
        if self.columns is not None and (isinstance(self.columns, str) or not self.columns):
            raise SpecError(
                f"open_feed: columns={self.columns!r} is not a list of names", next_step="name some, or omit it to read all"
            )
        if self.augment is not None and not callable(self.augment):
            raise SpecError(f"open_feed: augment={self.augment!r} is not a function")
        if (self.rank is None) != (self.world_size is None):
            raise SpecError(
                f"open_feed: rank={self.rank} and world_size={self.world_size} must be given together",
                next_step="give both, or neither to use those of torch.distributed",
            )
        self.shuffle_spec()
        try:
            self.share().checked()
        except ValueError as error:
            raise SpecError(f"open_feed: {error}") from error

    @classmethod
    def named(cls, values: Mapping[str, Any]) -> FeedOptions:
        """Make options of keyword arguments. Raises SpecError for an unknown name, or if `batch_rows` is missing."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise SpecError(
                    f"open_feed: unknown option {name!r}{did_you_mean(name, known)}", next_step=f"use {', '.join(known)}"
                )
        if "batch_rows" not in values:
            raise SpecError("open_feed: batch_rows is missing", next_step="give the rows of a step, such as batch_rows=256")
        return cls(**values)

    def share(self) -> FeedShare:
        """Return the part of every step's rows that this process reads."""
        rank, world_size = self.rank, self.world_size
        if rank is None or world_size is None:
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
        return FeedShare(self.batch_rows, rank, world_size, self.prefetch, self.last)

    def shuffle_spec(self) -> ShuffleSpec:
        """Return the order as a section of a pipeline file. Raises SpecError."""
        names = ("seed", "window_rows", "window_of", "lanes", "sample", "by_length")
        try:
            return ShuffleSpec.model_validate({"mode": self.shuffle, **{name: getattr(self, name) for name in names}})
        except ValidationError as error:
            raise spec_error(error) from error


def spec_error(error: ValidationError) -> SpecError:
    """Describe pydantic's first error in terms of `open_feed`'s arguments."""
    first = error.errors()[0]
    named = ["shuffle" if name == "mode" else str(name) for name in first["loc"]]  # key of a pipeline file to argument
    where = f"{'.'.join(named)}={first['input']!r}: " if named else ""
    return SpecError(
        f"open_feed: {where}{first['msg'].removeprefix('Value error, ').replace('mode: global', 'shuffle=global')}",
        next_step="correct the argument; help(penstock.FeedOptions) explains each one",
    )
