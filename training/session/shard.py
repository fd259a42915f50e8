"""The result of `ray.train.get_dataset_shard(name)`: Ray's DataIterator on penstock's feed.

One pass over the rows is an epoch in the spec's order, on each rank its share. The place in the rows is an epoch and a number
of rows, so a loop that reports in the middle of an epoch continues with the next batch. Batches of numbers alone come straight
from the feed; every other form, and columns that are not numbers, are made by Ray's own code from an Arrow table of the batch.
Source: ray.data.DataIterator, whose iterables start another epoch with each `iter()`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
import torch
from ray.data.block import BlockAccessor
from ray.data.collate_fn import DefaultCollateFn
from ray.data.extensions import ArrowTensorArray

from penstock.errors import SpecError
from penstock.ingest.columns.type_text import parse_type
from penstock.ingest.feed.batch import Batch
from penstock.ingest.schema import FeedSchema
from penstock.messages import counted

__all__ = ["Shard"]

OpenFeed = Callable[[int, torch.device], Any]
"""(rows of a global batch, device) -> this rank's feed, or what has its `batches`."""

_ELSEWHERE = {
    "local_shuffle_buffer_size": "shuffle: {mode: global} mixes all rows, and windowed mixes within shuffle.window_rows",
    "local_shuffle_seed": "shuffle.seed in the pipeline file is the seed",
}

_FUNCTION_COLLATES = "Passing a function to `iter_torch_batches"
"""Ray's advice to write a class; a function goes on working, and its guides have functions."""

_FORMATS = ("default", "numpy", "pandas", "pyarrow", None)


class Shard(ray.data.DataIterator):  # type: ignore[misc]  # Ray ships no types for it
    """One rank's rows of a named dataset. `to_tf`, `to_torch`, `iter_tf_batches` and `iter_jax_batches` are Ray's own.

    Args:
        name: of the dataset, for messages.
        schema: of the rows.
        rows: number of rows, of all ranks that share them.
        shares: number of ranks that share them; 1 if each gets all.
        open_feed: opens this rank's feed.
        device: default of torch batches.
        passed: called with each batch before the loop gets it: (epoch, batch, position, seconds of waiting).
        done: called when the loop requests the next batch.
        ended: called at the end of a pass with its epoch and whether it had one batch only; False if it does not count.
        start: (epoch, position) of the first pass.
        together: whether several passes may run at once: none of them is counted.
    """

    def __init__(
        self,
        name: str,
        schema: FeedSchema,
        rows: int,
        shares: int,
        open_feed: OpenFeed,
        device: torch.device,
        passed: Callable[[int, Batch, int, float], None] = lambda epoch, batch, position, wait_s: None,
        done: Callable[[], None] = lambda: None,
        ended: Callable[[int, bool], bool] = lambda epoch, looked: True,
        start: tuple[int, int] = (0, 0),
        together: bool = False,
    ) -> None:
        self._name, self._schema, self._rows, self._shares = name, schema, rows, shares
        self._open_feed, self._device = open_feed, device
        self._passed, self._done, self._ended = passed, done, ended
        self._next, self._together = start, together
        self._open: _Pass | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "iter_epochs" or (not name.startswith("_") and hasattr(ray.data.Dataset, name)):
            raise SpecError(
                f"the shard {self._name!r} has no {name}(): its rows come from penstock's feed, not from a ray.data.Dataset",
                next_step="walk iter_batches() or iter_torch_batches() once in each epoch; what changes rows belongs under "
                "preprocess",
            )
        raise AttributeError(f"the shard {self._name!r} has no attribute {name!r}")

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        dtypes: Any = None,
        device: Any = "auto",
        collate_fn: Any = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
    ) -> Iterable[Any]:
        """Return dicts of tensors, or results of `collate_fn` on batches of numpy arrays (or its class's input).

        Each `iter()` of the returned object starts another epoch, as with Ray.

        Args:
            prefetch_batches: ignored; the feed prefetches by itself.
            batch_size: rows on this rank; None is all.
            dtypes: one, or by column.
            device: `auto` is this rank's.
            pin_memory: of the results of `collate_fn`; the feed pins its tensors by itself.

        Raises:
            SpecError: an argument would change the order of the pipeline file.
        """
        self._refuse(local_shuffle_buffer_size=local_shuffle_buffer_size, local_shuffle_seed=local_shuffle_seed)
        to = self._device if device in (None, "auto") else torch.device(device)
        if collate_fn is not None or any(column.arrow for column in self._schema.columns):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", _FUNCTION_COLLATES)
                return super().iter_torch_batches(  # type: ignore[no-any-return]
                    batch_size=batch_size,
                    dtypes=dtypes,
                    device=to,
                    collate_fn=collate_fn,
                    drop_last=drop_last,
                    pin_memory=pin_memory and collate_fn is not None,
                )
        return _Epochs(lambda: self._batches(batch_size, drop_last, to), lambda batch: _cast(batch.columns, dtypes))

    def _iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        _collate_fn: Callable[[Any], Any] | None = None,
        _finalize_fn: Callable[[Any], Any] | None = None,
    ) -> Iterable[Any]:
        """Return batches for all methods of Ray's DataIterator."""
        self._refuse(local_shuffle_buffer_size=local_shuffle_buffer_size, local_shuffle_seed=local_shuffle_seed)
        if batch_format not in _FORMATS:
            raise SpecError(f"iter_batches: batch_format is {batch_format!r}; it can be numpy, pandas or pyarrow")

        def form(batch: Batch) -> Any:
            made = self._arrays(batch) if batch_format in ("default", "numpy") else _formed(self._table(batch), batch_format)
            if _collate_fn is not None:
                made = self._collated(_collate_fn, made)
            return made if _finalize_fn is None else _finalize_fn(made).data

        return _Epochs(lambda: self._batches(batch_size, drop_last), form)

    def _collated(self, collate_fn: Callable[[Any], Any], made: Any) -> Any:
        if not isinstance(collate_fn, DefaultCollateFn):
            return collate_fn(made)
        try:
            return collate_fn(made)
        except (TypeError, ValueError, RuntimeError, pa.ArrowException) as error:
            arrow = ", ".join(f"{column.name} ({column.arrow})" for column in self._schema.columns if column.arrow)
            raise SpecError(
                f"the shard {self._name!r}: iter_torch_batches() cannot make tensors of {arrow}: {error}",
                next_step="pass a collate_fn, which gets them as numpy arrays (a tokenizer belongs there), or walk "
                "iter_batches(), or leave the columns out (data.columns, or preprocess: - drop)",
            ) from error

    def iter_rows(self) -> Iterable[dict[str, Any]]:
        """Return rows as dicts. Each `iter()` of the returned object starts another epoch, as with Ray."""

        def rows() -> Iterator[dict[str, Any]]:
            for batch in self._batches(1, False):  # a report between two rows is at the place of the first one
                lists = {name: batch.columns[name].numpy() for name in self._schema.packed}  # of the only row
                dense = {name: c for name, c in batch.columns.items() if name.removesuffix("_offsets") not in lists}
                values = {name: c[0].numpy() if c.ndim > 1 else c[0].item() for name, c in dense.items()} | lists
                yield self._in_order({**values, **{name: column[0].as_py() for name, column in batch.arrow.items()}})

        return _Epochs(rows, lambda row: row)

    def iterator(self) -> Shard:
        """Return the shard itself, as materialized datasets of Ray do."""
        return self

    def materialize(self) -> Shard:  # type: ignore[override]  # not a dataset of Ray Data
        """Return a shard whose epochs all have this rank's rows of the first one, in the same order; the feed reads them again.

        Its epochs count as those of the training, so a loop continues in the middle of one.
        """
        return Shard(
            self._name,
            self._schema,
            self._rows,
            self._shares,
            lambda batch_rows, device: _FirstEpoch(self._open_feed(batch_rows, device)),
            self._device,
            self._passed,
            self._done,
            self._ended,
            self._next,
            self._together,
        )

    def schema(self) -> ray.data.Schema:
        """Return names and types of the columns."""
        fields = [
            (c.name, parse_type(c.arrow) if c.arrow else _arrow(np.empty((0, *c.shape), c.dtype)).type)
            for c in self._schema.columns
        ]
        return ray.data.Schema(pa.schema(fields))

    def count(self) -> int:
        """Count the rows, of all ranks that share them."""
        return self._rows

    def world_size(self) -> int:
        """Count the ranks that share the rows."""
        return self._shares

    def stats(self) -> str:
        """Describe the shard in a line."""
        return f"{self._name}: {counted(self._rows, 'row')}, prepared by penstock, shared by {counted(self._shares, 'worker')}"

    def get_context(self) -> ray.data.DataContext:
        """Return Ray Data's context of this process."""
        return ray.data.DataContext.get_current()

    def _to_ref_bundle_iterator(self) -> Any:
        raise SpecError(f"the shard {self._name!r} has no blocks of Ray Data: its rows come from penstock's feed")

    def _arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        arrays = {name: column.cpu().numpy() for name, column in batch.columns.items()}
        return self._in_order({**arrays, **_formed(pa.table(batch.arrow), "numpy")} if batch.arrow else arrays)

    def _table(self, batch: Batch) -> pa.Table:
        arrays = {name: _arrow(column.cpu().numpy()) for name, column in batch.columns.items()}
        return pa.table(self._in_order({**arrays, **batch.arrow}))

    def _in_order(self, columns: dict[str, Any]) -> dict[str, Any]:
        known = [column.name for column in self._schema.columns if column.name in columns]
        return {name: columns[name] for name in dict.fromkeys([*known, *columns])}

    def _refuse(self, **given: Any) -> None:
        for argument, value in given.items():
            if value is not None:
                raise SpecError(
                    f"the shard {self._name!r} does not support {argument}={value!r}", next_step=_ELSEWHERE[argument]
                )

    def _batches(self, batch_size: int | None, drop_last: bool, device: torch.device | None = None) -> Iterator[Batch]:
        """Iterate over the next epoch, or the rest of the resumed one.

        Raises:
            SpecError: another pass was started meanwhile.
        """
        own = batch_size if batch_size is not None else -(-self._rows // self._shares)
        whole = own * self._shares
        if self._open is not None and not self._together:
            self._end(self._open)
        epoch, position = self._next
        self._open = this = _Pass(epoch, position)
        self._next = (epoch + 1, 0)
        feed = self._open_feed(whole, device or torch.device("cpu"))
        # As with Ray, all ranks get equally many batches: one too small for all is dropped.
        fewest = whole if drop_last else self._shares
        asked_s = time.perf_counter()
        try:
            for batch in feed.batches(epoch, position):
                if batch.global_rows < fewest:
                    continue
                last = self._rows - batch.position < fewest
                self._passed(epoch, batch, self._rows if last else batch.position, time.perf_counter() - asked_s)
                this.batches += 1
                yield batch
                if self._open is not this and not self._together:
                    raise SpecError(
                        f"the shard {self._name!r}: two passes over its rows at once (zip(loader, loader), or one inside the "
                        "other) cannot be counted: each pass is an epoch",
                        next_step="end a pass before the next one, or keep the rows of one in a list",
                    )
                self._done()
                asked_s = time.perf_counter()
            this.whole = True
        finally:
            if self._open is this:
                self._end(this)

    def _end(self, over: _Pass) -> None:
        self._open = None
        if not self._ended(over.epoch, not over.whole and over.batches == 1):
            self._next = (over.epoch, over.start)


@dataclass(frozen=True)
class _FirstEpoch:
    """A feed whose epochs are all the first one of another."""

    feed: Any

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return self.feed.batches(0, start)  # type: ignore[no-any-return]


@dataclass
class _Pass:
    """A pass over the rows: number of batches so far, and whether all were given."""

    epoch: int
    start: int
    batches: int = 0
    whole: bool = False


class _Epochs(Iterable[Any]):
    """Passes over a shard: each `iter()` starts one."""

    def __init__(self, begin: Callable[[], Iterator[Any]], form: Callable[[Any], Any]) -> None:
        self._begin, self._form = begin, form

    def __iter__(self) -> Iterator[Any]:
        return (self._form(each) for each in self._begin())


def _arrow(values: np.ndarray) -> pa.Array:
    """Return an array [rows, *shape] as a column of Ray Data's blocks."""
    return pa.array(values) if values.ndim == 1 else ArrowTensorArray.from_numpy(values)


def _formed(table: pa.Table, batch_format: str | None) -> Any:
    return BlockAccessor.for_block(table).to_batch_format(batch_format)


def _cast(columns: Mapping[str, torch.Tensor], dtypes: Any) -> dict[str, torch.Tensor]:
    if dtypes is None:
        return dict(columns)
    wanted = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(columns, dtypes)
    return {name: column.to(wanted[name]) if name in wanted else column for name, column in columns.items()}
