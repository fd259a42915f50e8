"""How is a checkpoint written while training goes on? By one background thread of a rank, one checkpoint at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from penstock.training.checkpoint import CheckpointStore, Snapshot, StoredFile
from penstock.training.commit import commit
from penstock.training.idle_writer import IdleWriter, IdleWriterGoneError
from penstock.training.journal import JournalWriter, Point
from penstock.training.mailbox import CheckpointCommitted, Event, Warned
from penstock.training.not_a_number import check_weights
from penstock.training.snapshot_memory import SnapshotMemory
from penstock.training.state_files import NamedTensors

__all__ = ["BackgroundWriter", "CheckpointWriter"]

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Does one piece of work after the other in a thread. Called from the training thread.

    What a piece raises is raised by the next call, because training that cannot save itself must stop and not merely complain.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-checkpoint")
        self._running: Future[T] | None = None
        self.last: T | None = None

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        return self._running is not None and not self._running.done()

    def start(self, work: Callable[[], T]) -> None:
        """Begin; waits for the piece before. Who waits before copying holds at most one copy of the model."""
        self.wait()
        self._running = self._executor.submit(work)

    def check(self) -> None:
        """Raise the error of a write that failed; returns at once."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> T | None:
        """Wait until nothing is being written; returns what came of the last piece."""
        if self._running is not None:
            running, self._running = self._running, None
            self.last = running.result()
        return self.last

    def close(self) -> None:
        """End the thread, after the piece in hand. Never raises: the caller has its own error to report by now."""
        self._executor.shutdown(wait=True)


class CheckpointWriter(BackgroundWriter[str]):
    """Writes and commits checkpoints, tells of each and returns its name. Rank 0 only.

    Args:
        store: where to.
        journal: where metric points are sealed.
        post: takes the news.
        training_written: waits for the rank that writes the training state, as in `CheckpointStore.write`; None: this one does.
        idle: does it for the thread; not where another rank writes the training state.
        refuses_nan: a weight that is not a number is an error, and nothing counts that was written of it.
    """

    def __init__(
        self,
        store: CheckpointStore,
        journal: JournalWriter,
        post: Callable[[Event], None],
        training_written: Callable[[int], StoredFile] | None = None,
        idle: IdleWriter | None = None,
        refuses_nan: bool = False,
    ) -> None:
        super().__init__()
        self._store = store
        self._journal = journal
        self._post = post
        self._training_written = training_written
        self._idle = idle
        self._refuses_nan = refuses_nan

    @property
    def writes_training(self) -> bool:
        """Whether the training state is to be given."""
        return self._training_written is None

    def memory(self) -> SnapshotMemory | None:
        """Where to put the next copies, if anywhere. Waits for the checkpoint before, whose copies lay there."""
        self.wait()
        if self._idle is None:
            return None
        self._idle.memory.clear()
        return self._idle.memory

    def submit(self, completed: Callable[[], Snapshot[NamedTensors]], points: list[Point]) -> None:
        """Start writing; waits for the one before.

        Args:
            completed: gives what to write; called in the background, as it waits for copies and for what others still send.
            points: the metric points up to the snapshot's step that no earlier checkpoint sealed.

        Raises:
            CheckpointError: the one before failed.
            TrainingError: the one before had a weight that is not a number.
            RuntimeError: a rank was lost before it had sent its part of the one before.
        """
        self.start(lambda: self._write(completed, points))

    def _write(self, completed: Callable[[], Snapshot[NamedTensors]], points: list[Point]) -> str:
        snapshot = completed()  # its errors stay as they are: a lost rank says nothing of the storage

        def check() -> None:
            if self._refuses_nan:
                check_weights(snapshot.model.tensors, snapshot.facts.step)

        name = None
        if self._idle is not None:
            check()
            try:
                name = self._idle.write(snapshot, points)
            except IdleWriterGoneError as gone:
                self._idle = None
                if str(gone):
                    self._post(Warned(message=str(gone)))
                name = self._store.settle(snapshot)
        if name is None:
            name = commit(self._store, self._journal, snapshot, points, check, self._training_written)
        self._post(CheckpointCommitted(name=name, step=snapshot.facts.step))
        return name
