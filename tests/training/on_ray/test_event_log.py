"""Does the driver tell the first cause of a failure, and not its consequences?"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from penstock.errors import DataError, Interrupted, LeaseHeldError, PenstockError, ServiceError, TrainingError
from penstock.training.events import Event, Failure, Notice, TrainProgress, WorkersStarting, WorkerStarted
from penstock.training.on_ray.event_log import EventLog
from tests.training.digits import make_job


def attempt_after(folder: Path, *events: Event) -> EventLog:
    attempt = EventLog(make_job(folder), lambda events: None)
    attempt.publish(list(events))
    return attempt


def failure(rank: int, text: str, error: PenstockError | None = None) -> Failure:
    return Failure(rank=rank, final=error is not None, text=f"Traceback\n  line\n{text}\n", error=error)


class GroupError(Exception):
    """What Ray Train raises: a failure per rank."""

    def __init__(self) -> None:
        self.worker_failures = {
            0: RuntimeError("connection closed"),
            1: RuntimeError("The actor died\nCheck python-core-worker-*.log\npid 7"),
        }


def started(rank: int, restart: int) -> WorkerStarted:
    return WorkerStarted(rank=rank, host="h", pid=1, restart=restart)


def test_penstock_error_wins_over_broken_connections(tmp_path: Path) -> None:
    bad_row = DataError("row 7 is bad")
    attempt = attempt_after(tmp_path, failure(0, "RuntimeError: peer"), failure(1, "DataError", bad_row))
    assert attempt.error(GroupError()) is bad_row


def test_silent_death_wins_over_broken_connections(tmp_path: Path) -> None:
    error = attempt_after(tmp_path, failure(0, "RuntimeError: connection closed by peer")).error(GroupError())
    assert error.message == (
        "training failed: the process of rank 1 died before a step was done: it crashed, or it was killed "
        "(by hand, or for its memory) (1 other rank failed with it)"
    )
    assert error.problems == ("The actor died", "pid 7")


def test_death_after_restarts_names_the_last_step(tmp_path: Path) -> None:
    def tried(restart: int, *steps: int) -> list[Event]:
        progress = [TrainProgress(step=step, total_steps=9, epoch=0, rows_per_s=1.0) for step in steps]
        return [WorkersStarting(), started(0, restart), *progress]

    error = attempt_after(tmp_path, *tried(0, 35, 37), *tried(1), *tried(2, 37)).error(GroupError())
    assert error.message.startswith("training failed after 2 restarts: the process of rank 0 died after step 37")
    assert "before a step was done" in attempt_after(tmp_path, *tried(0, 35), *tried(1)).error(GroupError()).message


def test_first_of_equal_failures_is_shown_and_others_counted(tmp_path: Path) -> None:
    events = [failure(0, "OSError: first"), failure(2, "RuntimeError: late"), failure(1, "RuntimeError: later")]
    error = attempt_after(tmp_path, *events).error(RuntimeError("x"))
    assert error.message == "training failed: rank 0: OSError: first (2 other ranks failed with it)"


def test_hung_rank_is_blamed_not_the_waiting_one(tmp_path: Path) -> None:
    stalled = Notice(message="", blamed="rank 1 is in user code (model.py:3 in loss)")
    late = failure(0, "RuntimeError: timed out")
    error = attempt_after(tmp_path, stalled, late).error(RuntimeError("x"))
    assert error.message.startswith("training failed: no step was done while rank 1 is in user code (model.py:3 in loss)")
    assert "rank 0: RuntimeError: timed out" in error.problems[0]
    goes_on = TrainProgress(step=1, total_steps=2, epoch=0, rows_per_s=1)
    assert "rank 1" not in attempt_after(tmp_path, stalled, goes_on, late).error(RuntimeError("x")).message


def test_failures_before_a_restart_are_dropped(tmp_path: Path) -> None:
    events = [started(0, 0), failure(0, "OSError: old"), started(1, 1), started(0, 1), failure(0, "OSError: new")]
    error = attempt_after(tmp_path, *events).error(RuntimeError("x"))
    assert error.message == "training failed after 1 restart: rank 0: OSError: new"


def test_restart_after_a_final_error_is_refused(tmp_path: Path) -> None:
    bug = DataError("row 7 is bad")
    attempt = attempt_after(tmp_path, WorkersStarting(), started(0, 0), failure(0, "DataError", bug))
    assert not attempt.refused
    attempt.publish([WorkersStarting(), started(0, 1)])
    assert attempt.refused and attempt.error(GroupError()) is bug


def test_an_error_of_ray_itself_is_shown(tmp_path: Path) -> None:
    error = attempt_after(tmp_path).error(ValueError("no resources"))
    assert error.message == "training failed: ValueError: no resources"
    assert (
        error.next_step
        == "run the same command again; it continues from the newest checkpoint, or begins anew if there is none"
    )


def test_store_that_stays_away_keeps_class_and_next_step(tmp_path: Path) -> None:
    away = ServiceError("S3 fails", next_step="look at the store")
    failed = Failure(rank=0, final=False, text="ServiceError: S3 fails", error=away)
    error = attempt_after(tmp_path, started(0, 0), started(0, 1), failed).error(RuntimeError("x"))
    assert (type(error), error.exit_code, error.next_step) == (ServiceError, 3, "look at the store")
    assert error.message == "training failed after 1 restart: rank 0: S3 fails"
    assert error.retried, "train.retries bounds the tries, and Prefect's retries of the stage do not multiply them"
    stalled = attempt_after(tmp_path, Notice(message="", blamed="rank 1 is in user code"), failed).error(RuntimeError("x"))
    assert isinstance(stalled, TrainingError)


@pytest.mark.parametrize("restart", [1, 2])
def test_restarts_are_counted(tmp_path: Path, restart: int) -> None:
    attempt = attempt_after(tmp_path, *[started(rank, n) for n in range(restart + 1) for rank in (0, 1)])
    assert attempt.outcome(None).restarts == restart
    assert attempt.outcome(None).checkpoint is None


@pytest.mark.parametrize("stop", [Interrupted(signal.SIGINT), LeaseHeldError("taken over")])
def test_stop_during_listener_is_raised(tmp_path: Path, stop: PenstockError) -> None:
    def listen(events: list[Event]) -> None:
        raise stop

    with pytest.raises(type(stop)):
        EventLog(make_job(tmp_path), listen).publish([started(0, 0)])
