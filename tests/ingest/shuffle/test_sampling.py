"""Does each row come as often as its weight asks for, in every epoch and over all of them, and at a random place?"""

from __future__ import annotations

import json
import tracemalloc
from itertools import islice
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from torch import Tensor

from penstock.errors import DataError, ResumeError, SpecError
from penstock.ingest.feed.batch import FeedShare
from penstock.ingest.feed.cached import CachedFeed, open_cached_feed
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.shuffle.row_generator import RowGenerator
from penstock.ingest.shuffle.sampling import MAX_ROWS, Draws, check_column, make_draws
from penstock.ingest.spec import SampleSpec, ShuffleSpec
from penstock.storage import Storage
from tests.conformance.feed_cases import ROWS as FEED_ROWS

ROWS = 10_000
LABELS = np.repeat([4, 7, 9], [8_000, 1_900, 100])
WEIGHTS = np.arange(ROWS) % 5 / 4  # every fifth row is never drawn


def draws(values: np.ndarray, seed: int = 3, **sample: Any) -> Draws:
    return make_draws(SampleSpec(**sample), seed, values)


@pytest.mark.parametrize(
    ("sample", "kept", "peak"), [({"weights": "w"}, 40, 72), ({"balance": "w"}, 8, 26), ({"easiest_first": "w"}, 8, 24)]
)
def test_draws_take_as_many_bytes_a_row_as_docs_say(sample: dict[str, Any], kept: int, peak: int) -> None:
    values = np.arange(200_000) % 10
    tracemalloc.start()
    made = draws(values, **sample)
    found = [size / len(values) for size in tracemalloc.get_traced_memory()]
    tracemalloc.stop()
    assert made is not None
    assert found == pytest.approx([kept, peak], abs=1)


def epoch_of(made: Draws, epoch: int, rows: int = ROWS) -> np.ndarray:
    return made.ids_at(epoch, np.arange(rows))


def counts(ids: np.ndarray) -> np.ndarray:
    return np.bincount(ids, minlength=ROWS)


def test_classes_come_equally_often_and_so_do_the_rows_of_each() -> None:
    made = draws(LABELS, balance="label")
    total = np.zeros(ROWS, np.int64)
    for epoch in range(30):
        seen = counts(epoch_of(made, epoch))
        total += seen
        for label, rows in zip((4, 7, 9), (8_000, 1_900, 100), strict=True):
            share = ROWS / 3
            assert abs(seen[label == LABELS].sum() - share) <= 1
            assert set(seen[label == LABELS]) <= {int(share / rows), int(share / rows) + 1}
    assert total[LABELS == 4].min() >= 30 * ROWS / 3 / 8_000 - 2, "every row gets its turn"
    assert total[LABELS == 4].max() <= 30 * ROWS / 3 / 8_000 + 2


def test_a_power_goes_part_of_the_way() -> None:
    made = draws(LABELS, balance="label", power=0.5)
    seen = counts(epoch_of(made, 0))
    shares = np.array([seen[label == LABELS].sum() for label in (4, 7, 9)]) / ROWS
    roots = np.sqrt([8_000, 1_900, 100])
    assert shares == pytest.approx(roots / roots.sum(), abs=2 / ROWS)


def test_an_epoch_may_have_any_number_of_rows() -> None:
    for rows in (1, 70, 25_000):
        seen = counts(epoch_of(draws(LABELS, balance="label", rows=rows), 5, rows))
        assert seen.sum() == rows
        assert all(abs(seen[label == LABELS].sum() - rows / 3) <= 1 for label in (4, 7, 9))


def test_draws_differ_from_weights_by_less_than_one() -> None:
    made = draws(WEIGHTS, weights="w")
    expected = WEIGHTS / WEIGHTS.sum() * ROWS
    total = np.zeros(ROWS)
    for epoch in range(100):
        seen = counts(epoch_of(made, epoch))
        assert (np.abs(seen - expected) < 1.001).all()
        total += seen
    assert total[WEIGHTS == 0].sum() == 0
    assert np.abs(total / 100 - expected).max() < 0.05


def test_a_pattern_in_the_rows_does_not_meet_the_marks() -> None:
    """Half of the rows are drawn, and every other row is of a kind: a fixed stride would draw one kind alone."""
    made = draws(np.zeros(ROWS, np.int64), balance="label", rows=ROWS // 2)
    for epoch in range(5):
        kinds = epoch_of(made, epoch, ROWS // 2) % 2
        assert abs(kinds.mean() - 0.5) < 4.5 * 0.5 / np.sqrt(ROWS / 2)


def test_easiest_rows_come_first_all_rows_later() -> None:
    difficulty = (np.arange(ROWS) * 7919 % ROWS).astype(np.float32)
    made = draws(difficulty, easiest_first="difficulty", start=0.25, over_epochs=3)
    hardest = [difficulty[epoch_of(made, epoch)].max() for epoch in range(5)]
    assert hardest == [2_499, 4_999, 7_499, 9_999, 9_999]
    assert set(counts(epoch_of(made, 0))[difficulty < 2_500]) == {4}
    assert set(counts(epoch_of(made, 3))) == {1}


def test_draws_follow_from_seed_epoch_and_position_alone() -> None:
    made = draws(LABELS, balance="label")
    whole = epoch_of(made, 7)
    some = np.array([9_999, 0, 17, 5_000, 17])
    assert made.ids_at(7, some).tolist() == whole[some].tolist()
    assert epoch_of(draws(LABELS, balance="label"), 7).tolist() == whole.tolist()
    assert (epoch_of(draws(LABELS, balance="label", seed=4), 7) == whole).mean() < 0.05
    assert (epoch_of(made, 8) == whole).mean() < 0.05
    assert len(made.ids_at(0, np.arange(0))) == 0


def test_these_draws_do_not_change_with_a_version() -> None:
    assert draws(LABELS, balance="label").ids_at(2, np.arange(6)).tolist() == [8868, 1327, 574, 9509, 171, 8377]
    assert draws(WEIGHTS, weights="w").ids_at(2, np.arange(6)).tolist() == [1703, 5419, 9046, 5223, 3842, 5953]


def test_draws_come_at_random_places() -> None:
    limit = 4.5 / np.sqrt(ROWS)
    for made in (draws(LABELS, balance="label"), draws(WEIGHTS, weights="w")):
        ids = epoch_of(made, 1).astype(np.float64)
        assert abs(np.corrcoef(np.arange(ROWS), ids)[0, 1]) < limit
        for lag in (1, 2, 100):
            assert abs(np.corrcoef(ids[:-lag], ids[lag:])[0, 1]) < limit


@pytest.mark.parametrize(
    ("values", "sample", "words"),
    [
        (np.array([1, 2, -3.0, np.nan]), {"weights": "w"}, r"2 rows of column 'w' .* row 2 of the split .*: -3\.0"),
        (np.zeros(5), {"weights": "w"}, "column 'w' is 0 in every row"),
        (np.zeros(5, np.int64), {"balance": "y", "rows": MAX_ROWS + 1}, "1,073,741,825 rows; sampling needs 1 to"),
        (np.zeros(0, np.int64), {"balance": "y"}, "0 rows"),
    ],
)
def test_invalid_weights_and_sizes_are_refused(values: np.ndarray, sample: dict[str, Any], words: str) -> None:
    with pytest.raises((SpecError, DataError), match=words):
        draws(values, **sample)


def test_row_of_huge_weight_leaves_other_draws() -> None:
    weights = np.ones(200_001)
    weights[70] = 1e8  # the others are to get 400 draws in an epoch
    made = draws(weights, weights="w")
    for epoch in range(5):
        ids = epoch_of(made, epoch, len(weights))
        assert abs((ids != 70).sum() - 200_000 * 200_001 / 1e8) <= 2


@pytest.mark.parametrize(
    ("sample", "column", "words"),
    [
        ({"balance": "y"}, ColumnInfo(name="y", dtype="float32"), "column 'y' holds float32, and classes are integers"),
        ({"weights": "y"}, ColumnInfo(name="y", dtype="uint8", shape=(32, 32)), r"is uint8\[32, 32\]: several values per row"),
        ({"easiest_first": "z"}, ColumnInfo(name="y", dtype="float32"), "there is no column 'z'"),
    ],
)
def test_unsuitable_sample_column_is_refused_before_reading(sample: dict[str, str], column: ColumnInfo, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        check_column(SampleSpec.model_validate(sample), [column])


@pytest.mark.parametrize("sample", [{}, {"balance": "a", "weights": "b"}])
def test_one_column_must_be_named(sample: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="name one of balance, weights and easiest_first"):
        SampleSpec.model_validate(sample)


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"weights": "w", "power": 0.5}, "power needs balance"),
        ({"balance": "y", "start": 0.5}, "start needs easiest_first"),
        ({"balance": "y", "over_epochs": 2}, "over_epochs needs easiest_first"),
    ],
)
def test_an_option_without_effect_is_refused(sample: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SampleSpec.model_validate(sample)


@pytest.mark.parametrize("sample", [{"weights": "w"}, {"balance": "y", "power": 0.5}, {"easiest_first": "d", "rows": 7}])
def test_order_is_equal_after_json(sample: dict[str, Any]) -> None:
    order = make_order(ShuffleSpec(seed=5, sample=SampleSpec(**sample)), 100)
    again = type(order).model_validate(json.loads(json.dumps(order.model_dump(mode="json"))))
    assert again == order and again.fingerprint == order.fingerprint


def test_a_sample_needs_all_rows() -> None:
    with pytest.raises(ValidationError, match="needs mode: global, not windowed"):
        ShuffleSpec.model_validate({"mode": "windowed", "sample": {"balance": "label"}})


def opened(storage: Storage, manifest: DatasetManifest, sample: dict[str, Any], **place: Any) -> CachedFeed:
    order = make_order(ShuffleSpec(seed=5, sample=SampleSpec(**sample)), FEED_ROWS)
    return open_cached_feed([(storage, manifest)], "train", batch_rows=64, order=order, **place)


def test_sampled_feed_resumes_anywhere_on_any_ranks(storage: Storage, manifest: DatasetManifest) -> None:
    sample = {"balance": "label", "rows": 500}
    feed = opened(storage, manifest, sample)
    assert feed.num_rows == 500
    whole = [batch.row_ids.tolist() for batch in feed.batches(1)]
    assert sum(map(len, whole)) == 500
    stopped = opened(storage, manifest, sample)
    list(islice(stopped.batches(1), 3))
    for world_size in (1, 3):
        parts = [opened(storage, manifest, sample, rank=rank, world_size=world_size) for rank in range(world_size)]
        places = {part.load_state_dict(stopped.state_dict()) for part in parts}
        assert places == {(1, 192)}
        steps = zip(*(part.batches(1, 192) for part in parts), strict=True)
        assert [[row for part in step for row in part.row_ids.tolist()] for step in steps] == whole[3:]
    labels = np.concatenate([batch.columns["label"].numpy() for batch in feed.batches(0)])
    assert set(np.bincount(labels)) <= {500 // 7, 500 // 7 + 1}
    with pytest.raises(ResumeError, match=r"rows of an epoch .*: 500"):
        opened(storage, manifest, {"balance": "label"}).load_state_dict(stopped.state_dict())
    with pytest.raises(ResumeError, match="fingerprint"):
        opened(storage, manifest, {"weights": "label", "rows": 500}).load_state_dict(stopped.state_dict())
    with pytest.raises(SpecError, match="no column 'colour'"):
        opened(storage, manifest, {"balance": "colour"})


def test_repeated_row_gets_another_augmentation(storage: Storage, manifest: DatasetManifest) -> None:
    sample = {"balance": "label", "rows": 5_000}

    def noisy(columns: dict[str, Tensor], generator: RowGenerator) -> dict[str, Tensor]:
        return {**columns, "noise": generator.random()}

    def noise(start: int = 0, **place: int) -> list[float]:
        feed = opened(storage, manifest, sample, **place)
        feed.augment_with(noisy, seed=8)
        return [value for batch in feed.batches(0, start) for value in batch.columns["noise"].tolist()]

    whole = noise()
    assert len(set(whole)) > 4_990
    assert noise(start=640) == whole[640:]
    both = [noise(rank=rank, world_size=2) for rank in range(2)]
    assert sorted(both[0] + both[1]) == sorted(whole)


def test_rows_in_memory_are_drawn_as_those_on_disk() -> None:
    values = np.arange(FEED_ROWS)
    block = {"y": values % 3}
    schema = FeedSchema(columns=(ColumnInfo(name="y", dtype="int64"),))
    rows = RowGather(schema.columns, [FEED_ROWS], lambda _: block)
    order = make_order(ShuffleSpec(seed=5, sample=SampleSpec(balance="y")), FEED_ROWS)
    feed = CachedFeed(schema, "train", "c", rows, order, FeedShare(64))
    expected = make_draws(SampleSpec(balance="y"), 5, values % 3).ids_at(4, values)
    assert [row for batch in feed.batches(4) for row in batch.row_ids.tolist()] == expected.tolist()
    with pytest.raises(ValueError, match="rows are drawn"):
        order.ids(0, 0, 10)
    with pytest.raises(ValueError, match="rows are drawn"):
        order.ids_at(0, np.arange(10))
