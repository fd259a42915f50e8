"""Does a delivery to the driver survive a network that is away for a moment, and does only the driver's end stop training?"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from penstock.errors import PreflightError
from penstock.storage import Storage
from penstock.training.events import CheckpointCommitted, Event, Failure, Saving, Warned, WorkersLost, WorkerStarted
from penstock.training.loop.event_sender import EventSender
from penstock.training.on_ray.mailbox import Mailbox, MailboxHandle, RayMailboxClient
from penstock.training.on_ray.worker import check_storage_probe, write_storage_probe

AWAY = ActorUnavailableError("the node does not answer", None)


class Handle:
    """The handle of a mailbox in this process. Each call takes the next of `losses`: what is lost on the way."""

    def __init__(self, mailbox: Mailbox, losses: Sequence[str] = ()) -> None:
        self._mailbox, self._losses = mailbox, iter(losses)

    def call(self, method: str, *given: Any) -> Callable[[], Any]:
        def answer() -> Any:
            lost = next(self._losses, "")
            if lost == "actor":
                raise ActorDiedError()
            if lost == "call":
                raise AWAY
            found = getattr(self._mailbox, method)(*given)
            if lost == "answer":
                raise AWAY
            return found

        return answer


@pytest.fixture(autouse=True)
def ray_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.training.on_ray.mailbox.ray.get", lambda answer, timeout: answer())
    monkeypatch.setattr("penstock.training.on_ray.mailbox.UNREACHABLE_WAIT_S", 0.0)


@pytest.mark.parametrize("lost", [["call"], ["answer"], ["call", "answer", "call"]])
def test_unreachable_mailbox_gets_each_event_once(lost: list[str]) -> None:
    mailbox = Mailbox()
    client = client_of(mailbox, lost)
    first, second = Warned(message="first"), Warned(message="second")
    assert [client.put([first]), client.put([second])] == [False, False]
    assert mailbox.take() == [first, second]
    mailbox.stop()
    assert client.put([])


def test_dead_mailbox_means_save_and_stop() -> None:
    assert client_of(Mailbox(), ["actor"]).put([])


def client_of(mailbox: Mailbox, losses: Sequence[str]) -> RayMailboxClient:
    return RayMailboxClient(cast(MailboxHandle, Handle(mailbox, losses)), 0)


def test_failed_delivery_warns_and_stop_still_arrives() -> None:
    delivered: list[Event] = []

    class Client:
        fails = True

        def put(self, events: list[Event]) -> bool:
            if events and self.fails:
                self.fails = False
                raise RayError("of a new kind")
            delivered.extend(events)
            return bool(delivered)

    sender = EventSender(Client(), interval_s=0.001)
    sender.post(Saving(step=3))
    assert sender.stop_requested.wait(60)
    sender.close()
    said = "1 event of training could not be delivered to the driver: RayError: of a new kind"
    assert delivered == [Warned(message=said)]


def test_replaced_group_is_notified_and_ignored() -> None:
    mailbox, numbers = Mailbox(), count(1)

    def put(events: list[Event], restart: int) -> dict[str, bool]:
        return mailbox.put(events, restart, "rank 0", next(numbers))

    mailbox.starting()
    first = [mailbox.start(rank, "h", 1, None)["restart"] for rank in (0, 1)]
    put([CheckpointCommitted(name="a", step=1)], 0)
    mailbox.lost([1])
    assert put([CheckpointCommitted(name="b", step=2)], 0) == {"stop": False, "replaced": False}
    mailbox.starting()
    assert put([CheckpointCommitted(name="late", step=3)], 0) == {"stop": False, "replaced": True}
    second = [mailbox.start(rank, "h", 2, None)["restart"] for rank in (1, 0)]
    assert (first, second) == ([0, 0], [1, 1])
    assert put([CheckpointCommitted(name="late", step=3)], 0) == {"stop": False, "replaced": True}
    assert put([CheckpointCommitted(name="c", step=2)], 1) == {"stop": False, "replaced": False}
    heard = mailbox.take()
    assert [event.name for event in heard if isinstance(event, CheckpointCommitted)] == ["a", "b", "c"]
    assert [event.restart for event in heard if isinstance(event, WorkersLost)] == [1]
    assert len([event for event in heard if isinstance(event, WorkerStarted)]) == 4


def test_lost_workers_are_those_without_an_error() -> None:
    mailbox = Mailbox()
    mailbox.starting()
    for rank in (0, 1):
        mailbox.start(rank, f"node{rank}", 7 + rank, None)
    mailbox.put([Failure(rank=0, final=False, text="connection closed")], 0, "rank 0", 1)
    mailbox.lost([0, 1])
    assert [event.who for event in mailbox.take() if isinstance(event, WorkersLost)] == ["rank 1 on node1 (pid 8)"]


def test_rank_without_storage_names_its_node(tmp_path: Path) -> None:
    shared, own = Storage(str(tmp_path / "shared")), Storage(str(tmp_path / "own"))
    write_storage_probe(shared, 2)
    check_storage_probe(shared, 2)
    for storage, attempt in ((own, 2), (shared, 3)):
        with pytest.raises(PreflightError) as refused:
            check_storage_probe(storage, attempt)
        assert socket.gethostname() in refused.value.message and str(storage.uri("")) in refused.value.message
