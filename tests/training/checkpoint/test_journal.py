"""Do metric points survive a crash exactly once, whatever the checkpoints and attempts around them did?"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from penstock.storage import Storage
from penstock.training.checkpoint.fence import Writer
from penstock.training.checkpoint.journal import read_journal, seal_points, truncate_journal
from penstock.training.events import Point


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path))


def write(storage: Storage, attempt: int, steps: range, seals: list[int], shift: int = 0) -> None:
    points: list[Point] = []
    for step in steps:
        points.append(Point(1000 * step + shift, step, {"loss": step + shift / 10}))
        if step in seals:
            seal_points(storage, Writer(attempt), step, points)
            points.clear()


def test_points_up_to_a_step_are_read_in_order(storage: Storage) -> None:
    write(storage, 1, range(1, 9), [4, 8])
    assert [point.step for point in read_journal(storage, 100)] == list(range(1, 9))
    assert [point.step for point in read_journal(storage, 6)] == list(range(1, 7))


def test_points_are_read_back_even_if_not_finite(storage: Storage) -> None:
    seal_points(storage, Writer(1), 3, [Point(17, 3, {"a": math.nan, "b": math.inf, "c": -0.1})])
    (point,) = read_journal(storage, 3)
    assert (point.t_ms, point.step) == (17, 3)
    assert math.isnan(point.values["a"]) and point.values["b"] == math.inf and point.values["c"] == -0.1


def test_resume_drops_repeated_steps(storage: Storage) -> None:
    write(storage, 1, range(1, 9), [4, 8])
    truncate_journal(storage, 4)
    write(storage, 2, range(5, 13), [8, 12], shift=7)
    points = read_journal(storage, 12)
    assert [point.step for point in points] == list(range(1, 13))
    assert [point.t_ms % 1000 for point in points] == [0] * 4 + [7] * 8


def test_step_of_two_attempts_has_the_later_values(storage: Storage) -> None:
    write(storage, 1, range(1, 9), [4, 8])
    write(storage, 2, range(5, 7), [6], shift=7)
    points = read_journal(storage, 8)
    assert [point.step for point in points] == list(range(1, 9))
    assert [point.step for point in points if point.t_ms % 1000 == 7] == [5, 6]


def test_restarted_group_does_not_double_a_segment(storage: Storage) -> None:
    write(storage, 1, range(1, 5), [4])
    write(storage, 1, range(1, 5), [4], shift=7)
    assert [(point.step, point.t_ms % 1000) for point in read_journal(storage, 4)] == [(step, 7) for step in range(1, 5)]


def test_two_points_of_one_step_are_both_kept(storage: Storage) -> None:
    seal_points(storage, Writer(1), 5, [Point(1, 5, {"train/loss": 1.0})])
    seal_points(storage, Writer(1), 5, [Point(2, 5, {"val/loss": 2.0})])
    assert [dict(point.values) for point in read_journal(storage, 5)] == [{"train/loss": 1.0}, {"val/loss": 2.0}]


def test_only_unsent_segments_are_read(storage: Storage) -> None:
    write(storage, 1, range(1, 13), [4, 8, 12])
    (storage.local_path("journal") / "0000000004-a1-r0.jsonl").write_text("torn")
    assert [point.step for point in read_journal(storage, 10, after_step=4)] == list(range(5, 11))


def test_damaged_segment_is_named_and_others_are_read(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    write(storage, 1, range(1, 9), [4, 8])
    damaged = storage.local_path("journal") / "0000000004-a1-r0.jsonl"
    damaged.write_text(damaged.read_text()[:-20])
    assert [point.step for point in read_journal(storage, 8)] == [1, 2, 3, 5, 6, 7, 8]
    assert "0000000004-a1-r0.jsonl is damaged after 3 points" in caplog.text


def test_a_seal_without_points_writes_nothing(storage: Storage) -> None:
    seal_points(storage, Writer(1), 4, [])
    assert storage.list("journal") == []
