"""A fault at the n-th call of the driver to Ray while it trains: an error of ours, after which the same command ends the same.

Ray's calls go to a mailbox in this process; the driver's loop, the rank and its checkpoints are the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError, RaySystemError

from penstock.errors import SpecError, TrainingError
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.on_ray import trainer
from penstock.training.on_ray.fit import Fit
from penstock.training.on_ray.mailbox import Mailbox, MailboxHandle, RayMailboxClient
from penstock.training.on_ray.worker import RankResult, run_rank
from penstock.training.ranks import Group
from tests.training.digits import CPU, make_job, train_alone

ERRORS: dict[str, Callable[[], RayError]] = {
    "died": ActorDiedError,
    "unavailable": lambda: ActorUnavailableError("the node does not answer", None),
    "timeout": lambda: GetTimeoutError("Get timed out"),
    "system": lambda: RaySystemError("the raylet has closed the connection"),
}


class Calls:
    """Ray in this process. The call number `at` of the driver fails; an actor that has died stays dead for everybody."""

    def __init__(self, at: int, error: str) -> None:
        self.at, self.error, self.made, self.dead = at, error, 0, False
        self.mailbox = Mailbox()
        self._reached = threading.Event()
        self._driver = threading.current_thread()

    def open_mailbox(self, groups: int) -> Any:
        self.get(lambda: None)
        return self

    def call(self, method: str, *given: Any) -> Callable[[], Any]:
        return partial(getattr(self.mailbox, method), *given)

    def close(self) -> None:
        """As MailboxHandle's."""

    def get(self, call: Callable[[], Any], timeout: float | None = None) -> Any:
        is_driver = threading.current_thread() is self._driver
        self.made += is_driver
        if self.made >= self.at:
            self._reached.set()
        if not is_driver:  # a rank that ends before that would have the driver make fewer calls
            self._reached.wait(30)
        if self.dead or (self.made == self.at and is_driver):
            self.dead = self.error == "died"
            raise ERRORS[self.error]()
        return call()


@pytest.fixture
def train_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainOutcome]:
    def train(job: TrainJob, calls: Calls) -> TrainOutcome:
        class Here(Fit):
            def _train(self) -> RankResult:
                return run_rank(job, Group(0, 1, CPU), RayMailboxClient(cast(MailboxHandle, calls), 0))

            def kill_workers(self) -> None:
                raise AssertionError("nobody has asked it to stop")

            def end(self) -> None:
                self.over.wait(20)

        monkeypatch.setattr(trainer, "open_mailbox", calls.open_mailbox)
        monkeypatch.setattr(trainer, "TaskFit", lambda *_: Here(calls))
        monkeypatch.setattr(trainer, "POLL_S", 0.005)
        monkeypatch.setattr(trainer, "Watcher", partial(trainer.Watcher, clock=lambda: 0.0))  # it looks at no cluster
        monkeypatch.setattr(ray, "get", calls.get)
        return trainer.train(job, stop=threading.Event(), listener=lambda events: None)

    return train


def test_second_training_of_an_attempt_counts_groups_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_alone(make_job(tmp_path, max_steps=1))
    groups: list[int] = []

    def open_mailbox(before: int) -> Any:
        groups.append(before)
        raise SpecError("enough")

    monkeypatch.setattr(trainer, "open_mailbox", open_mailbox)
    for attempt in (1, 2):
        with pytest.raises(SpecError, match="enough"):
            trainer.train(make_job(tmp_path, attempt=attempt), stop=threading.Event(), listener=lambda events: None)
    assert groups == [1, 0]


@pytest.mark.parametrize("error", ERRORS)
def test_failed_ray_call_ends_attempt_with_training_error(
    tmp_path: Path, train_with: Callable[..., TrainOutcome], error: str
) -> None:
    def job(name: str, attempt: int = 1) -> TrainJob:
        more: dict[str, Any] = {"gpus": 0, "max_steps": 4, "checkpoint": {"every_steps": 1, "every_s": None}}
        return make_job(tmp_path, run=name, attempt=attempt, **more)

    calm = train_with(job("calm"), Calls(0, error))
    for at in (1, 4):  # the beginning of the mailbox, and a look into it
        with pytest.raises(TrainingError, match=f"lost Ray while it trained: {type(ERRORS[error]()).__name__}") as told:
            train_with(job(f"run-{at}"), Calls(at, error))
        assert "same command continues" in told.value.next_step
        assert not [thread for thread in threading.enumerate() if thread.name == "penstock-fit"], "a rank still trains"
        again = train_with(job(f"run-{at}", attempt=2), Calls(0, error))
        assert (again.status, again.weights_digest) == ("finished", calm.weights_digest)
