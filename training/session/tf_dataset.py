"""How does a shard become a `tf.data.Dataset`, as Ray's `to_tf` makes one?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import SpecError
from penstock.ingest.schema import FeedSchema

__all__ = ["tf_dataset"]


def tf_dataset(
    name: str,
    schema: FeedSchema,
    chosen: Sequence[str | list[str]],
    epoch: Callable[[], Iterator[Mapping[str, np.ndarray]]],
) -> Any:
    """A dataset whose elements are tuples with an entry for each of `chosen`: a tensor for a name, a dict for a list of names.

    Args:
        name: of the shard, for messages.
        epoch: begins a pass over the rows in batches.

    Raises:
        SpecError: TensorFlow is not installed, or there is no such column.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise SpecError(
            f"the shard {name!r}: to_tf() needs tensorflow, which cannot be imported: {error}",
            next_step="pip install tensorflow, or take iter_batches(), whose arrays TensorFlow reads",
        ) from error
    there = {column.name: column for column in schema.columns if column.ragged is None}
    for column in (column for columns in chosen for column in ([columns] if isinstance(columns, str) else columns)):
        if column not in there:
            raise SpecError(
                f"the shard {name!r}: to_tf() has no column {column!r} of one shape", next_step=f"take of {', '.join(there)}"
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
