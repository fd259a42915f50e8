"""What may a program say about how a dataset is read? The keyword arguments of `open_feed`, their defaults and checks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Required, TypedDict

import torch
import torch.distributed
from pydantic import ValidationError

from penstock.errors import SpecError
from penstock.ingest.feed.batch import Augment, FeedShare, LastBatch
from penstock.ingest.feed.delivery import Scaling
from penstock.ingest.spec import LengthSpec, SampleSpec, ShuffleSpec

__all__ = ["FeedArguments", "FeedOptions", "spec_error"]


class FeedArguments(TypedDict, total=False):
    """The keyword arguments of `open_feed`, for editors and type checkers: the fields of `FeedOptions`, which explains them."""

    batch_rows: Required[int]
    shuffle: Literal["none", "windowed", "global"]
    seed: int
    window_rows: int
    window_of: Literal["rows", "shards"]
    sample: SampleSpec | Mapping[str, Any] | None
    by_length: LengthSpec | Mapping[str, Any] | None
    mix: Literal["shares", "epochs"]
    temperature: float
    epoch_rows: int | None
    rank: int | None
    world_size: int | None
    columns: Sequence[str] | None
    augment: Augment | None
    device: torch.device | str
    as_float: Mapping[str, Scaling] | None
    prefetch: int
    last: LastBatch
    verify: bool


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """How `open_feed` reads.

    Attributes:
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
        SpecError: a value, or two together, make no sense.
    """

    batch_rows: int
    shuffle: Literal["none", "windowed", "global"] = "global"
    seed: int = 0
    window_rows: int = 1 << 18
    window_of: Literal["rows", "shards"] = "rows"
    sample: SampleSpec | Mapping[str, Any] | None = None
    by_length: LengthSpec | Mapping[str, Any] | None = None
    mix: Literal["shares", "epochs"] = "shares"
    temperature: float = 1.0
    epoch_rows: int | None = None
    rank: int | None = None
    world_size: int | None = None
    columns: Sequence[str] | None = None
    augment: Augment | None = None
    device: torch.device | str = "cpu"
    as_float: Mapping[str, Scaling] | None = None
    prefetch: int = 2
    last: LastBatch = "keep"
    verify: bool = True

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise SpecError(f"open_feed: temperature={self.temperature} must be above 0")
        if self.columns is not None and (isinstance(self.columns, str) or not self.columns):
            raise SpecError(
                f"open_feed: columns={self.columns!r} is no list of names", next_step="name some, or leave it out for all"
            )
        if self.augment is not None and not callable(self.augment):
            raise SpecError(f"open_feed: augment={self.augment!r} is no function")
        if self.mix not in ("shares", "epochs"):
            raise SpecError(f"open_feed: mix={self.mix!r} is neither 'shares' nor 'epochs'")
        if self.mix == "epochs" and self.epoch_rows is not None:
            raise SpecError(f"open_feed: epoch_rows={self.epoch_rows}, and mix='epochs' says itself how many rows an epoch has")
        if (self.rank is None) != (self.world_size is None):
            raise SpecError(
                f"open_feed: rank={self.rank} with world_size={self.world_size}: one means nothing without the other",
                next_step="give both, or neither to ask torch.distributed",
            )
        self.shuffle_spec()
        try:
            self.share().checked()
        except ValueError as error:
            raise SpecError(f"open_feed: {error}") from error

    @classmethod
    def named(cls, values: Mapping[str, Any]) -> FeedOptions:
        """The options of these names. Raises SpecError for a name that is none, or if `batch_rows` is missing."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                meant = f"; did you mean {close[0]!r}?" if close else ""
                raise SpecError(f"open_feed: unknown option {name!r}{meant}", next_step=f"use {', '.join(known)}")
        if "batch_rows" not in values:
            raise SpecError("open_feed: batch_rows is missing", next_step="give the rows of a step, such as batch_rows=256")
        return cls(**values)

    def share(self) -> FeedShare:
        """Which rows of every step are read here."""
        rank, world_size = self.rank, self.world_size
        if rank is None or world_size is None:
            together = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank, world_size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if together else (0, 1)
        return FeedShare(self.batch_rows, rank, world_size, self.prefetch, self.last)

    def shuffle_spec(self) -> ShuffleSpec:
        """The order, as a pipeline file describes it. Raises SpecError."""
        names = ("seed", "window_rows", "window_of", "sample", "by_length")
        try:
            return ShuffleSpec.model_validate({"mode": self.shuffle, **{name: getattr(self, name) for name in names}})
        except ValidationError as error:
            raise spec_error(error) from error


def spec_error(error: ValidationError) -> SpecError:
    """The first problem that pydantic found, in terms of `open_feed`'s arguments."""
    first = error.errors()[0]
    named = ["shuffle" if name == "mode" else str(name) for name in first["loc"]]  # a pipeline file's key, as it is here
    where = f"{'.'.join(named)}={first['input']!r}: " if named else ""
    return SpecError(
        f"open_feed: {where}{first['msg'].removeprefix('Value error, ').replace('mode: global', 'shuffle=global')}",
        next_step="correct the argument; help(penstock.FeedOptions) says what each one takes",
    )
