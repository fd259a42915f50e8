"""Whose checkpoints count? Those of the rank 0 that was started last; later writes of an earlier one never do.

A machine that was cut off may return with a rank 0 that was replaced meanwhile, and its earlier write may arrive at the store
minutes later. So a check before the write is not enough. Each rank 0 writes a record before it reads or writes:

    writers/a2-r1.json    {"inherited": ["step-0000000400-7f3a91", ...]}

with its attempt and restart in the name, and in it the checkpoints that were committed by then. For a reader only those count
that the newest writer inherited or wrote itself. A manifest names its writer.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.config import Section
from penstock.errors import CheckpointError, LeaseHeldError
from penstock.storage import Storage

__all__ = ["Fence", "Writer", "WriterRecord"]

FOLDER = "writers"

_NAME = re.compile(r"^a(\d+)-r(\d+)\.json$")


class Writer(NamedTuple):
    """Identifies a rank 0. Later ones are greater; the ledger numbers attempts, the mailbox the restarts within one."""

    attempt: int
    restart: int = 0

    def __str__(self) -> str:
        return f"a{self.attempt}-r{self.restart}"


class WriterRecord(Section):
    """The checkpoints that counted when the writer began."""

    inherited: frozenset[str]


class Fence:
    """The writers of one run.

    Args:
        storage: rooted at the run.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage.child(FOLDER)

    def newest(self) -> tuple[Writer, WriterRecord] | None:
        """Return the rank 0 that was started last, and its record; None before the first. Raises CheckpointError."""
        writer = self._newest()
        if writer is None:
            return None
        try:
            return writer, WriterRecord.model_validate_json(self._storage.read_bytes(f"{writer}.json"))
        except ValueError as error:
            raise CheckpointError(
                f"{self._storage.uri(f'{writer}.json')} is damaged: it names the checkpoints attempt {writer.attempt} found",
                next_step="restore it, or delete it to continue from one of these, and run the same command again",
            ) from error

    def enter(self, writer: Writer, committed: frozenset[str]) -> WriterRecord:
        """Make `writer` the newest. Later commits of others do not count.

        Args:
            committed: names of the checkpoints that count now.

        Raises:
            LeaseHeldError: a later one was started.
        """
        self.check(writer)
        record = WriterRecord(inherited=committed)
        self._storage.write_bytes(f"{writer}.json", record.model_dump_json().encode())
        return record

    def check(self, writer: Writer) -> None:
        """Raise LeaseHeldError if a later rank 0 was started."""
        newest = self._newest()
        if newest is not None and newest > writer:
            raise LeaseHeldError(
                f"this rank 0 (attempt {writer.attempt}, restart {writer.restart}) was replaced by another (attempt "
                f"{newest.attempt}, restart {newest.restart}): its writes would not count",
                next_step="nothing is lost: the newer one goes on",
            )

    def _newest(self) -> Writer | None:
        found = (_NAME.match(name) for name in self._storage.list())
        return max((Writer(int(match[1]), int(match[2])) for match in found if match), default=None)
