"""How is a checkpoint written while training goes on? By one background thread of rank 0, one checkpoint at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.errors import CheckpointError
from training.checkpoint import Checkpoint, CheckpointStore, Snapshot
from training.journal import JournalWriter, Point
from training.mailbox import CheckpointCommitted, Event

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes snapshots in order. Rank 0 only; called from the training thread.

    A failed write is raised by the next call, because training that cannot save itself must stop and not merely complain.
    """

    def __init__(self, store: CheckpointStore, journal: JournalWriter, post: Callable[[Event], None]) -> None:
        self._store = store
        self._journal = journal
        self._post = post
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-checkpoint")
        self._running: Future[Checkpoint] | None = None
        self.last: Checkpoint | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._running is not None and not self._running.done()

    def submit(self, completed: Callable[[], Snapshot], points: list[Point]) -> None:
        """Start writing; waits for the one before. Who waits before copying holds at most one copy of the model.

        Args:
            completed: gives what to write; called in the background, as it waits for what other ranks still send.
            points: the metric points up to the snapshot's step that no earlier checkpoint sealed.

        Raises:
            CheckpointError: the one before failed.
            RuntimeError: a rank was lost before it had sent its part of the one before.
        """
        self.wait()
        self._running = self._executor.submit(self._write, completed, points)

    def check(self) -> None:
        """Raise the error of a write that failed; returns at once."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> Checkpoint | None:
        """Wait until nothing is being written; returns the last checkpoint this writer committed.

        Raises:
            CheckpointError, RuntimeError: as `submit`.
        """
        if self._running is not None:
            running, self._running = self._running, None
            self.last = running.result()
        return self.last

    def close(self) -> None:
        """End the thread, after the write in hand. Never raises: the caller has its own error to report by now."""
        self._executor.shutdown(wait=True)

    def _write(self, completed: Callable[[], Snapshot], points: list[Point]) -> Checkpoint:
        snapshot = completed()  # its errors stay as they are: a lost rank says nothing of the storage
        try:
            return self._commit(snapshot, points)
        except CheckpointError:
            raise
        except Exception as error:  # as in CheckpointStore.write; the journal is written here too
            raise CheckpointError(f"cannot write a checkpoint: {type(error).__name__}: {error}") from error

    def _commit(self, snapshot: Snapshot, points: list[Point]) -> Checkpoint:
        def seal() -> None:
            # Before the commit: a checkpoint whose points are not durable would leave a gap that no replay can fill.
            for point in points:
                self._journal.add(point)
            self._journal.seal(snapshot.facts.step)

        checkpoint = self._store.write(snapshot, before_commit=seal)
        self._store.prune()
        self._post(CheckpointCommitted(name=checkpoint.name, step=checkpoint.manifest.step))
        return checkpoint
