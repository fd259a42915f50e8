"""How do categories become indices without being learnt, however many there are? By a hash, in so many buckets.

Source: Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pydantic import Field

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.fixed_shape import is_text
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.encoders import MAX_ONE_HOT
from penstock.ingest.preprocess.transforms.text.multi_hot import is_list_of_words, words_of
from penstock.ingest.preprocess.transforms.transform import ColumnNames, Functions, Transform
from penstock.ingest.read.row_hash import hash_columns
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml

__all__ = ["Hashing", "HashingOptions"]


class HashingOptions(Section):
    """Categories, or lists of them, that become numbers of buckets. Nothing is learnt, and no category is unknown."""

    columns: ColumnNames
    """Names, or `*` for every text column but the label. A value becomes an int64 index, which an embedding takes; a list of
    text or integers becomes a float32 vector that counts its entries by bucket."""
    buckets: int = Field(ge=2, le=1 << 31)
    """How many. Two categories share one more often than not from about the square root of this many categories on."""
    seed: int = 0
    """Another one deals the categories anew."""


class Hashing(Transform[HashingOptions]):
    """Categories to buckets by a hash."""

    Options = HashingOptions
    widens_rows = True

    def matches(self, kind: pa.DataType) -> bool:
        return is_text(kind)

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        takes = is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_list_of_words(kind)
        return None if takes else f"cast it to text first (cast: {{{in_yaml(column)}: string}})"

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        for name in self.columns(rows.table.schema, data.label):
            if is_list_of_words(rows.column(name).type):
                if self.options.buckets > MAX_ONE_HOT:
                    raise DataError(
                        f"preprocess: hashing: column {name!r} holds lists, whose vectors of {self.options.buckets:,} counts "
                        f"are longer than {MAX_ONE_HOT:,}",
                        next_step="use fewer buckets for lists",
                    )
                row, words = words_of(rows, name)
                counts = np.zeros((rows.table.num_rows, self.options.buckets), np.float32)
                np.add.at(counts, (row, self._buckets(words)), 1.0)
                rows.put(name, tensor_array(counts))
            else:
                rows.reject_missing(name)
                rows.put(name, pa.array(self._buckets(rows.column(name))))

    def _buckets(self, values: pa.Array) -> np.ndarray:
        """int64 [values]; the same for a value in every column, process and version."""
        hashes = hash_columns(pa.table({f"hashing {self.options.seed}": values}), [f"hashing {self.options.seed}"])
        return (hashes % np.uint64(self.options.buckets)).astype(np.int64)
