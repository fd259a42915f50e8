"""Whom does the mailbox listen to?"""

from __future__ import annotations

from penstock.training.events import CheckpointCommitted, WorkersLost, WorkerStarted
from penstock.training.on_ray.mailbox import Mailbox


def test_a_group_that_was_replaced_is_told_so_and_not_listened_to() -> None:
    mailbox = Mailbox()
    mailbox.starting()
    first = [mailbox.start(rank, "h", 1, None)["restart"] for rank in (0, 1)]
    mailbox.put([CheckpointCommitted(name="a", step=1)], 0)
    mailbox.lost([1])
    assert mailbox.put([CheckpointCommitted(name="b", step=2)], 0) == {"stop": False, "replaced": False}
    mailbox.starting()
    assert mailbox.put([CheckpointCommitted(name="late", step=3)], 0) == {"stop": False, "replaced": True}
    second = [mailbox.start(rank, "h", 2, None)["restart"] for rank in (1, 0)]
    assert (first, second) == ([0, 0], [1, 1])
    assert mailbox.put([CheckpointCommitted(name="late", step=3)], 0) == {"stop": False, "replaced": True}
    assert mailbox.put([CheckpointCommitted(name="c", step=2)], 1) == {"stop": False, "replaced": False}
    heard = mailbox.take()
    assert [event.name for event in heard if isinstance(event, CheckpointCommitted)] == ["a", "b", "c"]
    assert [event.restart for event in heard if isinstance(event, WorkersLost)] == [1]
    assert len([event for event in heard if isinstance(event, WorkerStarted)]) == 4
