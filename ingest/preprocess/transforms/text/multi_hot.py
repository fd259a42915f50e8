"""How does a list of categories become one vector?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import PositiveInt

from penstock.config import Section
from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.fixed_shape import is_text
from penstock.ingest.preprocess.learnt import ColumnFacts, ColumnState, Question
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.encoders import MAX_ONE_HOT
from penstock.ingest.preprocess.transforms.transform import Functions, Names, Transform
from penstock.ingest.spec import DataSpec
from penstock.messages import in_yaml, shorten

__all__ = ["MultiHot", "MultiHotOptions", "is_list_of_words", "words_of"]


class MultiHotOptions(Section):
    """A float32 vector per column with a 1 at the place of each of the list's entries, categories in sorted order."""

    columns: Names
    """Names of columns that hold lists of text or of integers, such as tags. An empty list is a vector of zeros."""
    max_categories: PositiveInt | None = None
    """Keep only that many categories, those that are in most entries of the train split; the others count as unknown."""
    unknown: Literal["ignore", "error"] = "ignore"
    """An entry that is no category of the train split: it has no place in the vector and is counted, or its row cannot be
    used."""


class MultiHot(Transform[MultiHotOptions]):
    """A vector of zeros and ones per list of categories."""

    Options = MultiHotOptions
    learns = True
    widens_rows = True

    def refusal(self, column: str, kind: pa.DataType) -> str | None:
        return None if is_list_of_words(kind) else "it takes lists of text or integers; one_hot takes one category a row"

    def question(self, column: str) -> Question:
        return Question(column, "categories", max_categories=self.options.max_categories)

    def learn(self, column: str, facts: ColumnFacts) -> ColumnState:
        if len(facts.categories) > MAX_ONE_HOT:
            raise DataError(
                f"preprocess: multi_hot: column {column!r} has {len(facts.categories):,} categories; vectors longer than "
                f"{MAX_ONE_HOT:,} are refused",
                next_step=f"keep the most frequent (max_categories: {MAX_ONE_HOT}), or hash them (hashing: "
                f"{{columns: [{in_yaml(column)}], buckets: 4096}})",
            )
        return ColumnState(column=column, categories=facts.categories)

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        self.require(rows, [state.column for state in fitted])
        for state in fitted:
            row, words = words_of(rows, state.column)
            try:
                keys = pa.array(state.categories or ()).cast(words.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(
                    f"preprocess: multi_hot was fitted on other entries than column {state.column!r} of {words.type} holds"
                ) from error
            codes = pc.index_in(words, keys)
            unseen = codes.is_null().to_numpy(zero_copy_only=False)
            if unseen.any() and self.options.unknown == "error":
                self._reject(rows, state.column, row, words, unseen)
                row, words = words_of(rows, state.column)
                codes = pc.index_in(words, keys)
                unseen = np.zeros(len(words), np.bool_)
            if unseen.any():
                rows.unseen[state.column] = rows.unseen.get(state.column, 0) + int(unseen.sum())
            vectors = np.zeros((rows.table.num_rows, len(state.categories or ())), np.float32)
            vectors[row[~unseen], pc.drop_null(codes).to_numpy()] = 1
            rows.put(state.column, tensor_array(vectors))

    def _reject(self, rows: Rows, name: str, row: np.ndarray, words: pa.Array, unseen: np.ndarray) -> None:
        first = {int(row[entry]): entry for entry in np.flatnonzero(unseen)[::-1].tolist()}
        mask = np.zeros(rows.table.num_rows, np.bool_)
        mask[list(first)] = True
        rows.reject(mask, "unknown category", name, lambda at: shorten(words[first[at]].as_py()))


def is_list_of_words(kind: pa.DataType) -> bool:
    """Whether these are lists of text or integers."""
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return lists and (is_text(kind.value_type) or pa.types.is_integer(kind.value_type))


def words_of(rows: Rows, name: str) -> tuple[np.ndarray, pa.Array]:
    """Row of each entry, int64 [entries], and the entries of a column of lists; rows that are null or have nulls go.

    Raises:
        DataError: it holds no lists of text or integers.
    """
    lists = rows.column(name)
    if not is_list_of_words(lists.type):
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
