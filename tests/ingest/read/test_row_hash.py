"""Are rows of any width hashed alike, and wide ones in few calls?"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from penstock.ingest.read import row_hash


@pytest.mark.parametrize("words_at_once", [1, 7, 1 << 16])
def test_row_hash_does_not_depend_on_words_at_once(words_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_hash, "_LANES_AT_ONCE", words_at_once)
    rows = np.arange(5 * 301, dtype=np.uint32).astype(np.uint8).reshape(5, 301)
    words = np.pad(rows, ((0, 0), (0, 3))).view("<u8")
    expected = np.full(5, row_hash._mix(np.array([301], np.uint64) ^ row_hash._LIST_TAG)[0])
    for at in range(words.shape[1]):
        expected += row_hash._mix(words[:, at] ^ row_hash._mix(np.array([at], np.uint64))[0])
    assert (row_hash._hash_lanes(rows) == row_hash._mix(expected)).all()


@pytest.mark.parametrize("values", [np.full(1 << 20, 0.5, np.float32), np.ones(1 << 20, np.uint8)], ids=["numbers", "bytes"])
def test_row_of_million_entries_is_hashed_in_few_calls(values: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, mix = [0], row_hash._mix

    def counted(words: row_hash.Hashes) -> row_hash.Hashes:
        calls[0] += 1
        return mix(words)

    monkeypatch.setattr(row_hash, "_mix", counted)
    column = pa.FixedSizeListArray.from_arrays(pa.array(np.tile(values, 2)), len(values))
    first, second = row_hash.hash_columns(pa.table({"x": column}), ["x"])
    assert first == second != 0
    assert calls[0] < 40
