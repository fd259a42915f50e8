"""The result of `ray.train.get_dataset_shard(name)`: Ray's DataIterator on penstock's feed.

One pass over the rows is an epoch in the spec's order, on each rank its share. The place in the rows is an epoch and a number
of rows, so a loop that reports in the middle of an epoch continues with the next batch. Source: ray.data.DataIterator, whose
iterables start another epoch with each `iter()`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from penstock.errors import SpecError
from penstock.ingest.columns.arrays import tensor_array
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
_NOT_THERE = {
    "iter_epochs": "walk iter_torch_batches() or iter_batches() once in each epoch",
    "to_torch": "take iter_torch_batches()",
}


class Shard:
    """One rank's rows of a named dataset.

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
    ) -> None:
        self._name, self._schema, self._rows, self._shares = name, schema, rows, shares
        self._open_feed, self._device = open_feed, device
        self._passed, self._done, self._ended = passed, done, ended
        self._next = start
        self._open: _Pass | None = None

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_THERE:
            raise SpecError(f"the shard {self._name!r} has no {name}()", next_step=_NOT_THERE[name])
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
        pin_memory: bool = False,
        **refused: Any,
    ) -> Iterable[Any]:
        """Return dicts of tensors, or results of `collate_fn` on batches of numpy arrays (or its class's input).

        Each `iter()` of the returned object starts another epoch, as with Ray.

        Args:
            prefetch_batches, pin_memory: ignored; the feed prefetches and pins by itself.
            batch_size: rows on this rank; None is all.
            dtypes: one, or by column.
            device: `auto` is this rank's.
        """
        _refuse(self._name, refused)
        to = self._device if device in (None, "auto") else torch.device(device)
        if collate_fn is not None:
            return _Epochs(
                lambda: self._batches(batch_size, drop_last),
                lambda batch: _on(collate_fn(_collated(collate_fn, batch)), to),
            )
        return _Epochs(lambda: self._batches(batch_size, drop_last, to), lambda batch: _cast(batch.columns, dtypes))

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        **refused: Any,
    ) -> Iterable[Any]:
        """Return batches as dicts of numpy arrays (`default`, `numpy`), DataFrames (`pandas`) or tables (`pyarrow`).

        Each `iter()` of the returned object starts another epoch, as with Ray.

        Raises:
            SpecError: an argument would change the order of the pipeline file, or the format is unknown.
        """
        _refuse(self._name, refused)
        forms = {None: _table, "default": _arrays, "numpy": _arrays, "pandas": _frame, "pyarrow": _table}
        if batch_format not in forms:
            raise SpecError(f"iter_batches: batch_format is {batch_format!r}; it can be numpy, pandas or pyarrow")
        return _Epochs(lambda: self._batches(batch_size, drop_last), lambda batch: forms[batch_format](batch.columns))

    def iter_rows(self) -> Iterable[dict[str, Any]]:
        """Return rows as dicts. Each `iter()` of the returned object starts another epoch, as with Ray."""
        return _Epochs(lambda: (row for batch in self._batches(256, False) for row in _rows(batch)), lambda row: row)

    def iterator(self) -> Shard:
        """Return the shard itself, as materialized datasets of Ray do."""
        return self

    def to_tf(
        self,
        feature_columns: str | list[str],
        label_columns: str | list[str],
        *,
        additional_columns: str | list[str] | None = None,
        prefetch_batches: int = 1,
        batch_size: int = 1,
        drop_last: bool = False,
        **refused: Any,
    ) -> Any:
        """Return a `tf.data.Dataset` of features and labels; each pass over it is an epoch.

        Args:
            feature_columns, label_columns, additional_columns: one name gives a tensor, a list of names a dict of them.
            prefetch_batches: ignored; the feed prefetches by itself.

        Raises:
            SpecError: TensorFlow is not installed, or a column does not exist.
        """
        _refuse(self._name, refused)
        chosen = [columns for columns in (feature_columns, label_columns, additional_columns) if columns is not None]
        return _tf_dataset(
            self._name, self._schema, chosen, lambda: iter(self.iter_batches(batch_size=batch_size, drop_last=drop_last))
        )

    def materialize(self) -> Shard:
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
        )

    def schema(self) -> pa.Schema:
        """Return names and types of the columns."""
        return _table(
            {column.name: torch.zeros(0, *column.shape, dtype=getattr(torch, column.dtype)) for column in self._schema.columns}
        ).schema

    def count(self) -> int:
        """Count the rows, of all ranks that share them."""
        return self._rows

    def stats(self) -> str:
        """Describe the shard in a line."""
        return f"{self._name}: {counted(self._rows, 'row')}, prepared by penstock, shared by {counted(self._shares, 'worker')}"

    def _batches(self, batch_size: int | None, drop_last: bool, device: torch.device | None = None) -> Iterator[Batch]:
        """Iterate over the next epoch, or the rest of the resumed one.

        Raises:
            SpecError: another pass was started meanwhile.
        """
        own = batch_size if batch_size is not None else -(-self._rows // self._shares)
        whole = own * self._shares
        if self._open is not None:
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
                if self._open is not this:
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


def _tf_dataset(
    name: str,
    schema: FeedSchema,
    chosen: Sequence[str | list[str]],
    epoch: Callable[[], Iterator[Mapping[str, np.ndarray]]],
) -> Any:
    """Make a dataset of tuples with an entry for each of `chosen`: a tensor for a name, a dict for a list of names.

    Args:
        name: of the shard, for messages.
        epoch: starts a pass over the rows in batches.

    Raises:
        SpecError: TensorFlow is not installed, or a column does not exist.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise SpecError(
            f"the shard {name!r}: to_tf() needs tensorflow, which cannot be imported: {error}",
            next_step="pip install tensorflow, or use iter_batches(), whose arrays TensorFlow reads",
        ) from error
    there = {column.name: column for column in schema.columns if column.ragged is None}
    for column in (column for columns in chosen for column in ([columns] if isinstance(columns, str) else columns)):
        if column not in there:
            raise SpecError(
                f"the shard {name!r}: to_tf(): {column!r} is not a column of one shape",
                next_step=f"choose from {', '.join(there)}",
            )

    def signature(column: str) -> Any:
        return tf.TensorSpec((None, *there[column].shape), there[column].dtype)

    def elements() -> Iterator[tuple[Any, ...]]:
        for batch in epoch():
            yield tuple(_chosen(columns, batch.__getitem__) for columns in chosen)

    made = tf.data.Dataset.from_generator(elements, output_signature=tuple(_chosen(columns, signature) for columns in chosen))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF  # it is this rank's share
    return made.with_options(options)


def _chosen(columns: str | list[str], value: Callable[[str], Any]) -> Any:
    return value(columns) if isinstance(columns, str) else {column: value(column) for column in columns}


def _refuse(name: str, given: Mapping[str, Any]) -> None:
    for argument, value in given.items():
        if value is not None:
            advice = _ELSEWHERE.get(argument, "take it out")
            raise SpecError(f"the shard {name!r} does not support {argument}={value!r}", next_step=advice)


def _arrays(columns: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: column.cpu().numpy() for name, column in columns.items()}


def _rows(batch: Batch) -> Iterator[dict[str, Any]]:
    arrays = _arrays(batch.columns)
    for row in range(batch.rows):
        yield {name: values[row] if values.ndim > 1 else values[row].item() for name, values in arrays.items()}


def _table(columns: Mapping[str, torch.Tensor]) -> pa.Table:
    return pa.table({name: tensor_array(values) for name, values in _arrays(columns).items()})


def _frame(columns: Mapping[str, torch.Tensor]) -> Any:
    import pandas as pd

    return pd.DataFrame({name: values if values.ndim == 1 else list(values) for name, values in _arrays(columns).items()})


def _collated(collate_fn: Any, batch: Batch) -> Any:
    from ray.data.collate_fn import ArrowBatchCollateFn, PandasBatchCollateFn

    if isinstance(collate_fn, ArrowBatchCollateFn):
        return _table(batch.columns)
    return _frame(batch.columns) if isinstance(collate_fn, PandasBatchCollateFn) else _arrays(batch.columns)


def _cast(columns: Mapping[str, torch.Tensor], dtypes: Any) -> dict[str, torch.Tensor]:
    if dtypes is None:
        return dict(columns)
    wanted = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(columns, dtypes)
    return {name: column.to(wanted[name]) if name in wanted else column for name, column in columns.items()}


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: _on(each, device) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on(each, device) for each in value)
    return value
