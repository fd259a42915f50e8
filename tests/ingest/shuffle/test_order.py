"""The order is a permutation, the same for ever, and mixes as its mode promises."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from itertools import combinations, pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ingest.feed.batch import FeedShare, own_positions
from penstock.ingest.shuffle import order as order_module
from penstock.ingest.shuffle.order import Order, ShardRows, make_order
from penstock.ingest.shuffle.permutation import Permutation, hash_words
from penstock.ingest.spec import ShuffleSpec
from tests import ROOT

GLOBAL = Order(mode="global", seed=17, rows=1000)
WINDOWED = Order(mode="windowed", seed=17, rows=1000, window_rows=128)
SHARDS = Order(mode="windowed", seed=17, rows=1000, window_rows=128, shards=ShardRows.of((100, 300, 50, 50, 200, 90, 110, 100)))
NONE = Order(mode="none", rows=1000)


# Written down once. Where one of these changes, so does the order's fingerprint, and runs with a checkpoint lose their place.
HASHES = [16294208416658607535, 13608149317741381227, 16490336266968443936]
GLOBAL_EPOCH_0 = [790, 476, 270, 629, 728, 361, 788, 390]
GLOBAL_EPOCH_1_END = [981, 509, 273, 55, 651, 62, 945, 227]
WINDOWED_EPOCH_0 = [952, 731, 706, 415, 487, 729, 271, 723]
WINDOWED_EPOCH_3 = [918, 115, 915, 783, 329, 906, 2, 658]
SHARDS_EPOCH_0 = [24, 485, 55, 98, 67, 7, 53, 95]
HUGE = [257831685662, 86998461616, 264357675438]
FINGERPRINTS = ["5fe991619828b5aa64b472beef7fd291", "d21b32e09299a2a06b552356cb928d0f", "595afbae850a865f2cd358c8e6bfa5fe"]


def test_hashes_never_change() -> None:
    assert hash_words() == 0
    assert [hash_words(0), hash_words(1, 2), hash_words(-1)] == HASHES


def test_ids_never_change() -> None:
    assert GLOBAL.ids(0, 0, 8).tolist() == GLOBAL_EPOCH_0
    assert GLOBAL.ids(1, 992, 1000).tolist() == GLOBAL_EPOCH_1_END
    assert WINDOWED.ids(0, 0, 8).tolist() == WINDOWED_EPOCH_0
    assert WINDOWED.ids(3, 124, 132).tolist() == WINDOWED_EPOCH_3
    assert SHARDS.ids(0, 0, 8).tolist() == SHARDS_EPOCH_0
    assert Order(mode="global", seed=-5, rows=10**12).ids(2, 10**11, 10**11 + 3).tolist() == HUGE
    assert [GLOBAL.fingerprint, WINDOWED.fingerprint, NONE.fingerprint] == FINGERPRINTS


def test_another_process_gives_the_same_ids() -> None:
    script = (
        "import json; from penstock.ingest.shuffle.order import Order\n"
        "o = Order(mode='windowed', seed=17, rows=1000, window_rows=128); "
        "print(json.dumps([o.ids(5, 0, 1000).tolist(), o.fingerprint]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}, capture_output=True, check=True
    ).stdout
    assert json.loads(out) == [WINDOWED.ids(5, 0, 1000).tolist(), WINDOWED.fingerprint]


@pytest.mark.parametrize("order", [NONE, GLOBAL, WINDOWED, SHARDS], ids=["none", "global", "windowed", "shards"])
def test_any_cut_gives_the_same_sequence(order: Order) -> None:
    whole = order.ids(2, 0, 1000)
    assert sorted(whole.tolist()) == list(range(1000))
    for cuts in ([0, 1, 999, 1000], [0, 127, 128, 129, 500, 1000], list(range(0, 1001, 10))):
        assert np.concatenate([order.ids(2, a, b) for a, b in pairwise(cuts)]).tolist() == whole.tolist()
    assert order.ids(2, 400, 400).shape == (0,)
    some = np.array([0, 1, 7, 400, 401, 998])
    assert order.ids_at(2, some).tolist() == whole[some].tolist()
    assert order.ids_at(2, some[:0]).shape == (0,)


@pytest.mark.parametrize("window_of", ["rows", "shards"])
def test_one_rank_of_many_computes_its_own_ids(monkeypatch: pytest.MonkeyPatch, window_of: str) -> None:
    shuffle = ShuffleSpec.model_validate({"mode": "windowed", "window_of": window_of})
    order = make_order(shuffle, 2_000_000, [20_000] * 100)
    part = FeedShare(batch_rows=500_000, rank=700, world_size=1000)
    positions = np.concatenate(own_positions(part, [(first, first + 500_000) for first in range(0, 2_000_000, 500_000)]))
    computed: list[int] = []
    real = Permutation.__call__

    def counted(permutation: Permutation, index: Any) -> Any:
        computed.append(len(index))
        return real(permutation, index)

    monkeypatch.setattr(Permutation, "__call__", counted)
    found = order.ids_at(1, positions)
    assert len(positions) == 2000 and sum(computed) < 5000
    assert found.tolist() == order.ids(1, 0, 2_000_000)[positions].tolist()


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 700),
    window=st.integers(2, 300),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 10**9),
    mode=st.sampled_from(["none", "windowed", "global", "shards"]),
    data=st.data(),
)
def test_every_row_comes_once(rows: int, window: int, seed: int, epoch: int, mode: str, data: st.DataObject) -> None:
    if mode == "shards":
        ends = sorted({*data.draw(st.lists(st.integers(1, max(1, rows)), max_size=40)), rows} - {0})
        shards = [end - start for start, end in pairwise([0, *(end for end in ends if end <= rows)])]
        order = make_order(ShuffleSpec(mode="windowed", window_of="shards", seed=seed, window_rows=window), rows, shards)
    else:
        order = make_order(ShuffleSpec(mode=mode, seed=seed, window_rows=window), rows)  # type: ignore[arg-type]
    whole = order.ids(epoch, 0, rows)
    assert whole.dtype == np.int64
    assert sorted(whole.tolist()) == list(range(rows))
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    assert order.ids(epoch, start, stop).tolist() == whole[start:stop].tolist()


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 1 << 36), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_permutation_can_be_undone(size: int, key: int, data: st.DataObject) -> None:
    permutation = Permutation(size, key)
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), np.int64)
    numbers = permutation(positions)
    assert ((numbers >= 0) & (numbers < size)).all()
    assert permutation.inverse(numbers).tolist() == positions.tolist()


def test_every_order_of_a_few_numbers_is_as_likely_as_any_other() -> None:
    """For shards, groups and windows there are often a handful: a biased order of six shards would be seen at every epoch."""
    keys = range(12_000)
    for size in (4, 5):
        seen = Counter(tuple(Permutation(size, key)(np.arange(size)).tolist()) for key in keys)
        expected = len(keys) / math.factorial(size)
        chi_square = sum((seen[order] - expected) ** 2 / expected for order in permutations(range(size)))
        assert abs(chi_square - math.factorial(size)) < 5 * math.sqrt(2 * math.factorial(size))
    odd = sum(is_odd(Permutation(9, key)(np.arange(9)).tolist()) for key in keys)
    assert 0.45 < odd / len(keys) < 0.55


def is_odd(order: list[int]) -> bool:
    return sum(later < earlier for earlier, later in combinations(order, 2)) % 2 == 1


@pytest.mark.parametrize("size", [2_000_003, 1 << 21])
def test_large_permutations_hit_every_number(size: int) -> None:
    assert np.bincount(Permutation(size, 3)(np.arange(size)), minlength=size).max() == 1


def test_seeds_epochs_and_sizes_give_unrelated_orders() -> None:
    base = GLOBAL.ids(0, 0, 1000)
    for other in (GLOBAL.ids(1, 0, 1000), Order(mode="global", seed=18, rows=1000).ids(0, 0, 1000)):
        assert (base == other).sum() < 10  # about 1 of 1000 stays by chance
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.1


@pytest.mark.parametrize("rows", [1000, 4099, 65536, 200_000])
def test_global_order_looks_random(rows: int) -> None:
    ids = Order(mode="global", seed=5, rows=rows).ids(0, 0, rows).astype(np.float64)
    limit = 4.5 / np.sqrt(rows)  # 4.5 standard deviations of a sample correlation
    assert abs(np.corrcoef(np.arange(rows), ids)[0, 1]) < limit
    side = int(np.sqrt(rows))
    for lag in (1, 2, 3, side - 1, side, side + 1):
        assert abs(np.corrcoef(ids[:-lag], ids[lag:])[0, 1]) < limit
    ascents = int((np.diff(ids) > 0).sum())
    assert abs(ascents - (rows - 1) / 2) < 4.5 * np.sqrt((rows + 1) / 12)
    counts = np.histogram2d(np.arange(rows), ids, bins=16)[0]
    expected = rows / 256
    assert ((counts - expected) ** 2 / expected).sum() < 225 + 4.5 * np.sqrt(2 * 225)  # (16 - 1)**2 degrees of freedom


def test_fixed_points_and_pairs_are_as_rare_as_random() -> None:
    fixed = neighbours = 0
    for epoch in range(400):
        ids = Order(mode="global", seed=1, rows=501).ids(epoch, 0, 501)
        fixed += int((ids == np.arange(501)).sum())
        neighbours += int((np.diff(ids) == 1).sum())
    assert abs(fixed - 400) < 90  # both are Poisson with mean 1 per epoch
    assert abs(neighbours - 400) < 90


def test_every_row_reaches_every_position() -> None:
    counts = np.zeros((7, 7))
    for epoch in range(2100):
        counts[np.arange(7), Order(mode="global", seed=3, rows=7).ids(epoch, 0, 7)] += 1
    assert ((counts - 300) ** 2 / 300).sum() < 36 + 4.5 * np.sqrt(72)


def test_windows_hold_few_groups_and_mix_fully_inside() -> None:
    order = Order(mode="windowed", seed=2, rows=400 * 256, window_rows=8192)
    group, window = order.group_rows, 8192
    assert group == 256
    seen = []
    for first in range(0, 90_000, window):
        ids = order.ids(0, first, first + window)
        groups = np.unique(ids // group)
        assert len(groups) == 32
        seen.append(groups)
        inside = np.argsort(np.argsort(ids))
        assert abs(np.corrcoef(np.arange(window), inside)[0, 1]) < 4.5 / np.sqrt(window)
    assert not np.array_equal(seen[0], np.unique(order.ids(1, 0, window) // group))


def test_window_of_shards_holds_whole_mixed_shards() -> None:
    sizes = [1000 + 7 * (number % 13) for number in range(64)]
    ends = np.cumsum(sizes)
    order = Order(mode="windowed", seed=2, rows=int(ends[-1]), window_rows=8192, shards=ShardRows.of(tuple(sizes)))
    position, windows = 0, []
    while position < order.rows:
        # The window that begins here: whole shards, just enough of them.
        ids = order.ids(0, position, min(order.rows, position + 8192 + max(sizes)))
        shards: list[int] = []
        for row in ids.tolist():
            shard = int(np.searchsorted(ends, row, side="right"))
            if shard not in shards:
                if sum(sizes[s] for s in shards) >= 8192:
                    break
                shards.append(shard)
        size = sum(sizes[s] for s in shards)
        window = ids[:size]
        assert sorted(window.tolist()) == sorted(r for s in shards for r in range(int(ends[s]) - sizes[s], int(ends[s])))
        rank = np.argsort(np.argsort(window))
        assert abs(np.corrcoef(np.arange(size), rank)[0, 1]) < 4.5 / np.sqrt(size)
        windows.append(sorted(shards))
        position += size
    assert sorted(s for window in windows for s in window) == list(range(64))
    assert len(windows) == 8
    assert windows[0] != windows[1] and not np.array_equal(order.ids(1, 0, 100), order.ids(0, 0, 100))


def test_shards_with_other_row_count_are_refused() -> None:
    with pytest.raises(ValueError, match="the shards have 30 rows, the split 1000"):
        Order(mode="windowed", rows=1000, window_rows=10, shards=ShardRows.of((10, 20)))


def test_windows_spread_over_the_split() -> None:
    order = Order(mode="windowed", seed=2, rows=100_000, window_rows=8192)
    ids = order.ids(0, 0, 100_000)
    assert abs(np.corrcoef(np.arange(100_000), ids)[0, 1]) < 0.15  # 391 groups: the noise of groups, not of rows


@pytest.mark.parametrize(("epoch", "start", "stop"), [(-1, 0, 1), (0, -1, 1), (0, 2, 1), (0, 0, 1001)])
def test_positions_outside_are_refused(epoch: int, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="1000 rows"):
        GLOBAL.ids(epoch, start, stop)


def test_fields_without_effect_do_not_change_the_order() -> None:
    one = make_order(ShuffleSpec(mode="global", seed=1, window_rows=10), 50)
    assert one == make_order(ShuffleSpec(mode="global", seed=1, window_rows=20), 50)
    assert make_order(ShuffleSpec(mode="none", seed=1), 50) == make_order(ShuffleSpec(mode="none", seed=2), 50)


def test_a_changed_generator_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = GLOBAL.fingerprint
    order_module._fingerprint.cache_clear()
    order_module._permutation.cache_clear()
    monkeypatch.setattr("penstock.ingest.shuffle.permutation.ROUNDS", 7)
    try:
        assert GLOBAL.fingerprint != before
    finally:
        order_module._fingerprint.cache_clear()
        order_module._permutation.cache_clear()


def test_the_fingerprint_survives_json() -> None:
    assert Order.model_validate_json(WINDOWED.model_dump_json()).fingerprint == WINDOWED.fingerprint


def test_saved_order_has_digest_of_its_shards_only() -> None:
    rows = np.full(5000, 7)
    order = make_order(ShuffleSpec(mode="windowed", window_of="shards", window_rows=70, lanes=1), 35_000, rows)
    text = order.model_dump_json()
    saved = Order.model_validate_json(text)
    assert len(text) < 500 and saved == order
    with pytest.raises(ValueError, match="rows of 5,000 shards are not known"):
        saved.ids(0, 0, 10)
    with pytest.raises(ValueError, match="5,000 other shards than these 5,000"):
        saved.of_shards(rows[::-1] + np.arange(5000) % 2)
    again = saved.of_shards(rows)
    assert again.fingerprint == order.fingerprint and (again.ids(3, 0, 99) == order.ids(3, 0, 99)).all()
