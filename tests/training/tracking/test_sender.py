"""Does the queue in front of a tracking server keep order, lose nothing, and never let one bad record block the rest?"""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

from penstock.storage import Storage
from penstock.training.events import Point
from penstock.training.tracking.sender import Operation, Outbox, Sender
from tests.runs.servers import eventually


class Down(Exception):
    """The server does not answer."""


class Refusal(Exception):
    """The server understood and said no."""


class FakeServer:
    """Takes points and operations, unless set to be down, or to refuse some."""

    def __init__(self) -> None:
        self.up = threading.Event()
        self.up.set()
        self.hit = threading.Event()
        self.log: list[object] = []
        self.requests: list[int] = []
        self.refused: set[object] = set()
        self.failing: set[str] = set()

    @property
    def steps(self) -> list[object]:
        return [entry for entry in self.log if isinstance(entry, int)]

    def _answer(self) -> None:
        self.hit.set()
        if not self.up.is_set():
            raise Down("connection refused")

    def send_points(self, points: list[Point]) -> None:
        self._answer()
        self.requests.append(len(points))
        if any(point.step in self.refused for point in points):
            raise Refusal("bad point")
        self.log.extend(point.step for point in points if point.step not in self.log)

    def perform(self, operation: Operation) -> None:
        self._answer()
        name = operation.args["name"]
        if name in self.refused:
            raise Refusal("bad operation")
        if name in self.failing:
            raise Down("internal error")
        self.log.append(name)

    def is_final(self, error: Exception) -> bool:
        return isinstance(error, Refusal)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


def make(server: FakeServer, outbox: Storage | None = None) -> Sender:
    return Sender(server, outbox, delays_s=(0.01, 0.05), points_every_s=0.0)


def point(step: int) -> Point:
    return Point(step, step, {"loss": 1.0})


def operation(name: str, any_order: bool = False) -> Operation:
    return Operation(kind="note", args={"name": name}, any_order=any_order)


def test_points_of_an_outage_arrive_once_and_in_order(server: FakeServer) -> None:
    server.up.clear()
    sender = make(server)
    sender.start()
    for step in range(2500):
        sender.put_points([point(step)])
    assert server.hit.wait(60) and len(sender._queue) == 2500
    server.up.set()
    assert sender.drain(60) == 0
    assert server.steps == list(range(2500))


def test_points_gather_until_drained_or_followed_by_operation(server: FakeServer) -> None:
    sender = Sender(server, points_every_s=3600.0)
    sender.start()
    sender.put_points([point(0)])
    eventually(lambda: len(sender._queue) == 0, 60, "the first point", every_s=0.01)
    for step in range(1, 500):
        sender.put_points([point(step)])
    assert server.requests == [1]
    assert sender.drain(60) == 0
    assert server.requests == [1, 499]
    for step in range(500, 2500):
        sender.put_points([point(step)])
    eventually(lambda: len(sender._queue) < 1000, 60, "what fills a request", every_s=0.01)
    sender.put(operation("tag"))
    eventually(lambda: len(sender._queue) == 0, 60, "what an operation waits for", every_s=0.01)
    assert server.steps == list(range(2500))


def test_operation_waits_only_for_points_before_it(server: FakeServer) -> None:
    sender = make(server)
    sender.put_points([point(1), point(2)])
    sender.put(operation("checkpoint"))
    sender.put_points([point(step) for step in range(3, 2000)])
    sender.start()
    assert sender.drain(60) == 0
    at = server.log.index("checkpoint")
    assert server.log.index(2) < at < server.log.index(1999)


def test_refused_requests_block_nothing_and_warn_once(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.refused = {3, 6}
    sender = make(server)
    for steps in (range(2), range(2, 4), range(4, 6), range(6, 8)):
        sender.put_points([point(step) for step in steps])
        sender.put(operation(f"after {steps.stop}"))
    sender.start()
    assert sender.drain(60) == 0
    assert server.steps == [0, 1, 2, 4, 5, 7] and "after 8" in server.log
    assert [record.getMessage() for record in caplog.records] == [
        "the tracking server refuses the point of step 3, and maybe later ones: bad point"
    ]


def test_failing_artifact_blocks_nothing_else(server: FakeServer) -> None:
    server.failing = {"figure"}
    sender = make(server)
    sender.put(operation("figure", any_order=True))
    sender.put(operation("tag"))
    sender.put_points([point(1)])
    sender.start()
    eventually(lambda: len(sender._queue) == 1, 30, "all but the artifact", every_s=0.01)
    assert sorted(map(str, server.log)) == ["1", "tag"]
    server.failing = set()
    assert sender.drain(60) == 0


def test_operations_of_an_outage_survive_a_kill(server: FakeServer, tmp_path: Path) -> None:
    outbox = Storage(str(tmp_path))
    server.up.clear()
    sender = make(server, outbox)
    sender.start()
    sender.put(operation("spec"))
    sender.put(operation("figure", any_order=True))
    assert server.hit.wait(60)
    wait_for_file(tmp_path / "outbox.json", "figure")  # nothing is called on the sender any more: the process is gone

    next_server = FakeServer()
    heir = make(next_server, outbox)
    assert heir.recover(Outbox.load(outbox)) == []
    heir.start()
    assert heir.drain(60) == 0
    heir.stop()
    assert sorted(map(str, next_server.log)) == ["figure", "spec"]
    assert not (tmp_path / "outbox.json").exists()


def test_undelivered_records_wait_in_outbox(server: FakeServer, tmp_path: Path) -> None:
    outbox = Storage(str(tmp_path))
    server.up.clear()
    sender = make(server, outbox)
    sender.start()
    sender.put_points([point(step) for step in range(5)])
    sender.put(operation("status"))
    assert sender.drain(0.2) == 6
    sender.stop()
    left = Outbox.load(outbox)
    assert [p[1] for p in left.points] == [0, 1, 2, 3, 4] and [o.args["name"] for o in left.operations] == ["status"]


def test_abandoned_sender_leaves_outbox_to_new_owner(server: FakeServer, tmp_path: Path) -> None:
    outbox = Storage(str(tmp_path))
    server.up.clear()
    sender = make(server, outbox)
    sender.start()
    sender.put(operation("status"))
    wait_for_file(tmp_path / "outbox.json", "status")
    outbox.write_bytes("outbox.json", b"the new owner's")
    sender.put(operation("later"))
    sender.abandon()
    assert outbox.read_bytes("outbox.json") == b"the new owner's"


def test_unreadable_outbox_is_ignored_once(tmp_path: Path) -> None:
    (tmp_path / "outbox.json").write_text('{"operations": [')
    assert Outbox.load(Storage(str(tmp_path))) == Outbox() and not (tmp_path / "outbox.json").exists()


def wait_for_file(path: Path, word: str) -> None:
    """Block until the sender's own thread has written `word`."""
    eventually(lambda: path.exists() and word in path.read_text(), 30, f"{path} with {word!r}", every_s=0.01)


def test_outbox_keeps_nan_and_infinity(tmp_path: Path) -> None:
    written = Outbox(points=((1, 1, {"loss": float("nan"), "norm": float("inf")}), (2, 2, {"loss": 0.5})))
    read = Outbox.model_validate_json(written.model_dump_json())
    assert [(t, step) for t, step, _ in read.points] == [(1, 1), (2, 2)]
    assert math.isnan(read.points[0][2]["loss"]) and math.isinf(read.points[0][2]["norm"])
