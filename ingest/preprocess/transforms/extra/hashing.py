"""How do words become numbers, without an index for each? Hashed into buckets.

Source: Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.casts import is_list
from penstock.ingest.columns.fixed_shape import is_text
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.encoders import MAX_ONE_HOT
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Transform
from penstock.ingest.read.row_hash import hash_columns
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml

__all__ = ["Hashing", "HashingOptions"]


def _is_list_of_words(kind: pa.DataType) -> bool:
    """Whether these are lists of text or integers."""
    return is_list(kind) and (is_text(kind.value_type) or pa.types.is_integer(kind.value_type))


def _words_of(rows: Rows, name: str) -> tuple[np.ndarray, pa.Array]:
    """Return the row of each entry, int64 [entries], and the entries of a column of lists; rows with nulls are rejected.

    Raises:
        DataError: it holds no lists of text or integers.
    """
    lists = rows.column(name)
    if not _is_list_of_words(lists.type):
        raise DataError(f"preprocess: column {name!r} is {lists.type}; lists of text or integers are needed here")
    rows.reject(lists.is_null().to_numpy(zero_copy_only=False), "null", name)
    lists = rows.column(name)
    parents, entries = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists)
    if entries.null_count:
        mask = np.zeros(len(lists), np.bool_)
        mask[parents[entries.is_null().to_numpy(zero_copy_only=False)]] = True
        rows.reject(mask, "null", name)
        lists = rows.column(name)
        parents, entries = pc.list_parent_indices(lists).to_numpy(), pc.list_flatten(lists)
    return parents.astype(np.int64), entries


class HashingOptions(Section):
    """Categories, or lists of them, that become numbers of buckets. Nothing is learnt, and no category is unknown."""

    columns: ColumnNames
    """Names, or `*` for every text column but the label. A value becomes an int64 index, as an embedding takes it. A list of
    text or integers becomes a float32 vector of counts by bucket."""
    buckets: int = Field(ge=2, le=1 << 31)
    """Number of buckets. From about the square root of this many categories on, two of them probably share one."""
    seed: int = 0
    """Seed of the hash; another one gives other buckets."""


class Hashing(Transform[HashingOptions]):
    """Categories to buckets by a hash."""

    Options = HashingOptions
    widens_rows = True

    def matches(self, kind: pa.DataType) -> bool:
        return is_text(kind)

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        takes = is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or _is_list_of_words(kind)
        return None if takes else f"cast it to text first (cast: {{{in_yaml(column)}: string}})"

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        for name in self.columns_of(rows.table.schema, data):
            if _is_list_of_words(rows.column(name).type):
                if self.options.buckets > MAX_ONE_HOT:
                    raise DataError(
                        f"preprocess: hashing: column {name!r} holds lists, whose vectors of {self.options.buckets:,} counts "
                        f"are longer than {MAX_ONE_HOT:,}",
                        next_step="use fewer buckets for lists",
                    )
                row, words = _words_of(rows, name)
                counts = np.zeros((rows.num_rows, self.options.buckets), np.float32)
                np.add.at(counts, (row, self._buckets(words)), 1.0)
                rows.put(name, tensor_array(counts))
            else:
                rows.reject_missing(name)
                rows.put(name, pa.array(self._buckets(rows.column(name))))

    def _buckets(self, values: pa.Array) -> np.ndarray:
        """int64 [values]; the same for a value in every column, process and version."""
        hashes = hash_columns(pa.table({f"hashing {self.options.seed}": values}), [f"hashing {self.options.seed}"])
        return (hashes % np.uint64(self.options.buckets)).astype(np.int64)
