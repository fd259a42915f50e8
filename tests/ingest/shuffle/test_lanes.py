"""Rows dealt to lanes come once an epoch, mix like a full shuffle, and each lane's are in few shards."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.errors import SpecError
from penstock.ingest.shuffle import lanes as lanes_module
from penstock.ingest.shuffle.lanes import LaneRows, PartOf
from penstock.ingest.shuffle.mixing_quality import chi2_by_freedom
from penstock.ingest.shuffle.order import Order, ShardRows, make_order
from penstock.ingest.spec import ShuffleSpec

SHARDS = (1009, 997, 1013, 31, 1009, 503, 1, 1021, 1009, 1009, 991, 1407)  # 10,000 rows

# Written down once. Where one of these changes, so does the order's fingerprint, and runs with a checkpoint lose their place.
GLOBAL_EPOCH_0 = [7016, 5744, 9875, 3647]
WINDOWED_EPOCH_3 = [7383, 6520, 9726, 5361]
FINGERPRINTS = ["b4ddc0a560f4faf8b7b6d7691b152283", "a99b5a82970c0c055734ede31a69a7d8"]


def order_of(lanes: int, shards: tuple[int, ...] = SHARDS, **shuffle: Any) -> Order:
    return make_order(ShuffleSpec.model_validate({"lanes": lanes, **shuffle}), sum(shards), shards)


WINDOWED = {"mode": "windowed", "window_rows": 2048}


def test_lanes_never_change() -> None:
    whole, windowed = order_of(4, seed=17), order_of(4, seed=17, window_of="shards", **WINDOWED)
    assert whole.ids(0, 0, 4).tolist() == GLOBAL_EPOCH_0
    assert windowed.ids(3, 9996, 10_000).tolist() == WINDOWED_EPOCH_3
    assert [whole.fingerprint, windowed.fingerprint] == FINGERPRINTS
    assert order_of(1, seed=17) == make_order(ShuffleSpec(seed=17), 10_000)


@settings(max_examples=150, deadline=None)
@given(
    shards=st.lists(st.sampled_from([1, 2, 3, 7, 31, 101, 509, 1021]), min_size=1, max_size=30),
    lanes=st.sampled_from([2, 3, 4, 7, 8, 13, 64]),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 10**9),
    kind=st.sampled_from(["global", "rows", "shards"]),
    window=st.integers(2, 3000),
    data=st.data(),
)
def test_each_row_comes_once_in_lanes(
    shards: list[int], lanes: int, seed: int, epoch: int, kind: str, window: int, data: st.DataObject
) -> None:
    rows, mode = sum(shards), {"mode": "global"}
    if kind != "global":
        mode = {"mode": "windowed", "window_rows": window, "window_of": kind}
    spec = ShuffleSpec.model_validate({"lanes": lanes, "seed": seed, **mode})
    if lanes > rows:
        with pytest.raises(SpecError, match=f"{lanes} lanes for {rows}"):
            make_order(spec, rows, shards)
        return
    order = make_order(spec, rows, shards)
    whole = order.ids(epoch, 0, rows)
    assert whole.dtype == np.int64
    assert sorted(whole.tolist()) == list(range(rows))
    some = np.array(sorted(data.draw(st.sets(st.integers(0, rows - 1), max_size=20))), np.int64)
    assert order.ids_at(epoch, some).tolist() == whole[some].tolist()
    # Each lane's rows are the same in every epoch, in the shards that are known before.
    ends = np.cumsum(shards)
    for lane in range(lanes):
        own = whole[lane::lanes]
        assert len(own) == rows // lanes + (lane < rows % lanes)
        assert sorted(own.tolist()) == sorted(order.ids(epoch + 1, 0, rows)[lane::lanes].tolist())
        assert set(ends.searchsorted(own, side="right").tolist()) == set(order.lane_rows.shards_of(lane, lane + 1))
    assert sum(len(order.lane_rows.shards_of(lane, lane + 1)) for lane in range(lanes)) <= len(shards) + lanes - 1


def test_many_chunks_and_windows_give_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [50_021] * 20
    for mode in ({}, {"mode": "windowed", "window_rows": 1 << 17}, {**WINDOWED, "window_rows": 1 << 17, "window_of": "shards"}):
        order = order_of(8, tuple(rows), seed=1, **mode)
        whole = order.ids(2, 0, order.rows)
        assert np.bincount(whole, minlength=order.rows).max() == 1
        with monkeypatch.context() as patch:
            patch.setattr(lanes_module, "_CHUNK", 64)
            for low, high in ((0, 999), (order.rows // 2, order.rows // 2 + 999), (order.rows - 999, order.rows)):
                assert order.ids(2, low, high).tolist() == whole[low:high].tolist()


@pytest.mark.parametrize(("rows", "lanes"), [(65_536, 8), (200_000, 64), (200_003, 7), (30_000, 64)])
def test_orders_of_lanes_look_random_and_unrelated(rows: int, lanes: int) -> None:
    order = order_of(lanes, (rows,), seed=5)
    ids = order.ids(0, 0, rows)
    line = np.argsort(order.lane_rows._row_0)  # one shard: the line is the rows themselves
    assert len(line) == lanes
    own = [(ids[lane::lanes] - order.lane_rows._begins[lane]).astype(float)[: rows // lanes] for lane in range(lanes)]
    limit = 4.9 / np.sqrt(rows // lanes)
    place = np.arange(rows // lanes)
    for lane, values in enumerate(own):
        assert abs(np.corrcoef(place, values)[0, 1]) < limit
        for other in own[:lane]:
            assert abs(np.corrcoef(values, other)[0, 1]) < limit
            assert (values == other).sum() < 12  # Poisson with mean 1
            assert abs(np.corrcoef(np.diff(values), np.diff(other))[0, 1]) < 1.3 * limit
    again = order.ids(1, 0, rows)
    assert (again == ids).sum() < 4 * lanes + 20
    # Cells of place and row of all lanes together: (16 - 1)**2 degrees of freedom.
    counts = np.histogram2d(np.tile(place, lanes), np.concatenate(own), bins=16)[0]
    expected = counts.sum() / 256
    assert ((counts - expected) ** 2 / expected).sum() < 225 + 4.5 * np.sqrt(2 * 225)


def test_every_row_of_a_short_lane_reaches_every_place() -> None:
    counts = np.zeros((2, 7, 7))
    order = order_of(2, (7, 7), seed=3)
    for epoch in range(2100):
        ids = order.ids(epoch, 0, 14)
        for lane in range(2):
            counts[lane, np.arange(7), ids[lane::2] % 7] += 1
    assert (((counts - 300) ** 2 / 300).sum(axis=(1, 2)) < 36 + 4.5 * np.sqrt(72)).all()


def chi2_of(order: Order, batch: int = 512, classes: int = 100) -> float:
    """Chi2 of the classes in batches by its degrees of freedom, where stored rows are sorted by class: 1 is random."""
    of_class = order.ids(0, 0, order.rows) * classes // order.rows
    found = [np.bincount(of_class[at : at + batch], minlength=classes) for at in range(0, order.rows - batch, batch)]
    expected = batch / classes
    return float((((np.array(found) - expected) ** 2 / expected).sum(axis=1) / (classes - 1)).mean())


def test_batches_of_lanes_mix_as_simulated() -> None:
    shards = (1000,) * 1000
    assert chi2_of(order_of(8, shards)) == pytest.approx(1.0, abs=0.06)
    assert chi2_of(order_of(64, shards)) == pytest.approx(0.94, abs=0.06)
    many = chi2_of(order_of(256, shards, mode="windowed", window_of="shards", window_rows=2))
    few = chi2_of(order_of(64, shards, mode="windowed", window_of="shards", window_rows=2))
    assert many < 2.2 < few < 9


def test_window_of_shards_in_lanes_reads_a_shard_in_one_stretch() -> None:
    order = order_of(4, (1000,) * 64, mode="windowed", window_of="shards", window_rows=8000)
    assert order.lane_rows.windows == 8  # of two shards in each lane
    shard = order.ids(0, 0, order.rows) // 1000
    for number in range(64):
        places = np.flatnonzero(shard == number)
        assert places[-1] - places[0] < 3 * 8000
    first = set(shard[:8000].tolist())
    assert len(first) <= 4 * 3
    assert first != set((order.ids(1, 0, 8000) // 1000).tolist())


@pytest.mark.parametrize(
    ("shuffle", "batch_rows", "shards", "lanes"),
    [
        ({}, 256, 1000, 64),
        ({}, 96, 1000, 32),
        ({}, 100, 1000, 4),
        ({}, 83, 1000, 1),
        ({}, 256, 13, 8),
        ({}, 256, 1, 1),
        ({"mode": "windowed"}, 512, 1000, 64),
        ({"mode": "windowed", "window_of": "shards"}, 512, 1000, 256),
        ({"mode": "none"}, 512, 1000, 1),
        ({"sample": {"balance": "label"}}, 512, 1000, 1),
        ({"by_length": {"column": "tokens"}}, 512, 1000, 1),
        ({"lanes": 1}, 512, 1000, 1),
        ({"lanes": 12}, 512, 5, 12),
    ],
)
def test_auto_divides_the_batch(shuffle: dict[str, Any], batch_rows: int, shards: int, lanes: int) -> None:
    order = make_order(ShuffleSpec.model_validate(shuffle), shards * 100, [100] * shards, batch_rows)
    assert (order.lanes, order.version) == (lanes, 1 if lanes == 1 else 2)


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"sample": {"balance": "label"}}, "sample draws from all rows"),
        ({"by_length": {"column": "tokens"}}, "by_length puts rows of all shards into a step"),
        ({"mode": "none"}, "mode: none reads them as stored"),
    ],
)
def test_lanes_beside_what_needs_all_rows_are_refused(beside: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        ShuffleSpec.model_validate({"lanes": 8, **beside})
    assert ShuffleSpec.model_validate({"lanes": 1, **beside}).most_lanes(64) == 1


def test_order_without_shards_of_its_lanes_is_refused() -> None:
    with pytest.raises(ValidationError, match="version 2 has no 4 lanes of 0 shards"):
        Order(version=2, mode="global", rows=10, lanes=4)
    with pytest.raises(ValidationError, match="version 1 has no 2 lanes"):
        Order(mode="global", rows=10, lanes=2, shards=ShardRows.of((10,)))


def test_lanes_change_the_fingerprint() -> None:
    found = {order_of(lanes, seed=1).fingerprint for lanes in (1, 2, 4)}
    assert len(found) == 3


def test_part_of_a_row_is_found_among_uneven_parts() -> None:
    ends = np.cumsum([5, 1, 1, 1, 1, 1, 1, 900, 3])
    found = PartOf(ends)(np.arange(ends[-1]))
    assert found.tolist() == [part for part, (low, high) in enumerate(pairwise([0, *ends.tolist()])) for _ in range(high - low)]


def test_ids_of_many_lanes_and_shards_are_exact_at_the_end() -> None:
    rows = LaneRows([10**9 + 7] * 1000, 256, seed=9)
    ids = rows.ids_at(5, np.arange(rows.rows - 1000, rows.rows))
    assert len(set(ids.tolist())) == 1000 and ids.min() >= 0 and ids.max() < rows.rows


def order_of_stream(units: list[int], lanes: int | str = "auto", unit_bytes: int = 1 << 30, **shuffle: Any) -> Order:
    spec = ShuffleSpec.model_validate({"mode": "windowed", "lanes": lanes, "seed": 3, **shuffle})
    return make_order(spec, sum(units), units, batch_rows=64, unit_bytes=[unit_bytes] * len(units))


@pytest.mark.parametrize(
    ("units", "unit_bytes", "lanes"),
    [
        ([100] * 64, 1 << 30, 8),  # 10 units are a window
        ([100] * 64, 1 << 24, 64),  # or 64 are 1 GiB
        ([100] * 64, 1 << 25, 32),
        ([100] * 7 + [300], 1, 2),  # no lane is smaller than a unit
        ([1000], 1, 1),
    ],
)
def test_auto_lanes_of_a_stream_hold_a_unit_each(units: list[int], unit_bytes: int, lanes: int) -> None:
    order = order_of_stream(units, unit_bytes=unit_bytes, window_rows=1000)
    assert (order.lanes, order.version) == (lanes, 3 if lanes > 1 else 1)


def test_lane_smaller_than_a_unit_of_a_stream_is_refused() -> None:
    with pytest.raises(SpecError, match=r"4 lanes of 250 rows are smaller than the stream's largest unit .* which has 300"):
        order_of_stream([100] * 7 + [300], lanes=4, window_rows=100)


def test_unit_cut_between_lanes_is_needed_at_once_in_both() -> None:
    units, window = [97, 250, 131, 60, 199, 240, 17, 222] * 16, 2000
    order = order_of_stream(units, lanes=8, window_rows=window)
    lane_rows = order.lane_rows
    assert lane_rows.window_rows <= window
    for epoch in (0, 1):
        ids = order.ids(epoch, 0, order.rows)
        assert np.bincount(ids).tolist() == [1] * order.rows
        of_unit = np.cumsum(units).searchsorted(ids, side="right")
        cut = 0
        for unit, rows in enumerate(units):
            places = np.flatnonzero(of_unit == unit)
            first, last = places.min() // 8, places.max() // 8
            if len(set((places % 8).tolist())) > 1:
                cut += 1
                assert last < rows + window // 8 or first >= order.rows // 8 - rows - window // 8
            assert last - first < rows + 2 * (window // 8)
        assert cut >= 6
        shard, lane, ends = lane_rows.part_uses(epoch)
        for unit in range(len(units)):
            places = np.flatnonzero(of_unit == unit)
            assert set(lane[shard == unit].tolist()) == set((places % 8).tolist())
            assert places.max() < ends[shard == unit].max() <= places.max() + 1 + window + 8


def test_lanes_of_a_stream_mix_better_than_one_window() -> None:
    units = [1000] * 1000
    one = chi2_by_freedom(order_of_stream(units, lanes=8, window_rows=16_000), 512)
    many = chi2_by_freedom(order_of_stream(units, lanes=64, window_rows=64_000), 512)
    assert one is not None and many is not None
    assert many < 5 < one < 70, "one window of neighbours: 500"
