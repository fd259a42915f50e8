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


@pytest.mark.parametrize("entries_at_once", [1, 3, 8])
def test_list_hash_does_not_depend_on_entries_at_once(entries_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lists: list[list[float | None] | None] = [[], [0.5, None, 2.5], None, [], [1.5] * 17, [0.0], [-3.5, 0.5, 0.5]]
    table = pa.table(
        {
            "list": pa.array(lists, pa.list_(pa.float64())),
            "nested": pa.array([[each or [], [7.5]] for each in lists], pa.large_list(pa.list_(pa.float64()))),
            "fixed": pa.array(
                [[0.5, 1.5], None, [1.0, 2.0], [0.5, None], [3.5, 0.0], None, [1.0, None]], pa.list_(pa.float32(), 2)
            ),
            "text": pa.array([[str(value) for value in each or ()] for each in lists], pa.list_(pa.string())),
        }
    )
    whole = [row_hash.hash_columns(part, [name]) for name in table.column_names for part in (table, table.slice(2, 4))]
    monkeypatch.setattr(row_hash, "_ENTRIES_AT_ONCE", entries_at_once)
    parts = [row_hash.hash_columns(part, [name]) for name in table.column_names for part in (table, table.slice(2, 4))]
    assert all((one == other).all() for one, other in zip(whole, parts, strict=True))
    assert len({*whole[0].tolist()}) == 6  # the empty lists are equal


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
