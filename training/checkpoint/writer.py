"""How is a checkpoint written while training goes on? By one background thread of rank 0, one checkpoint at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from penstock.errors import LeaseHeldError
from penstock.storage import Storage
from penstock.training.checkpoint.journal import seal_points
from penstock.training.checkpoint.store import CheckpointStore, Snapshot
from penstock.training.events import CheckpointCommitted, Event, Point, Warned

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes and commits checkpoints, and posts an event for each. Called from the training thread of rank 0.

    The next call raises the error of a write: training that cannot save itself must stop.

    Args:
        store: gets the checkpoints.
        run_storage: gets the metric points.
        post: takes events.
    """

    def __init__(self, store: CheckpointStore, run_storage: Storage, post: Callable[[Event], None]) -> None:
        self._store = store
        self._run_storage = run_storage
        self._post = post
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="penstock-checkpoint")
        self._running: Future[str] | None = None
        self._last: str | None = None
        self._warned = False

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._running is not None and not self._running.done()

    def submit(self, completed: Callable[[], Snapshot], points: Iterable[Point]) -> None:
        """Wait for the write before, then start writing. A caller that waits before it copies holds one copy of the model.

        Args:
            completed: returns the snapshot; called in the background, as it waits for copies and for other ranks.
            points: the metric points up to the snapshot's step that no earlier checkpoint sealed.

        Raises:
            CheckpointError: the write before failed.
            TrainingError, RuntimeError: `completed` of the write before raised it: a weight is not a number, or a rank was lost
                before it had sent its part.
        """
        self.wait()
        self._running = self._executor.submit(self._write, completed, points)

    def check(self) -> None:
        """Raise the error of a write that failed; returns at once."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> str | None:
        """Wait for the write in progress; return the name of the last checkpoint."""
        if self._running is not None:
            running, self._running = self._running, None
            self._last = running.result()
        return self._last

    def close(self) -> None:
        """End the thread after the write in progress. Never raises: the caller may have an error of its own."""
        self._executor.shutdown(wait=True)

    def _write(self, completed: Callable[[], Snapshot], points: Iterable[Point]) -> str:
        snapshot = completed()  # its errors stay as they are: they are not the storage's
        step = snapshot.facts.step
        # Before the commit: else the points of a checkpoint could be lost for ever.
        seal = partial(seal_points, self._run_storage, self._store.writer, step, points)
        name = self._store.write(snapshot, seal).name
        try:
            self._store.prune()
        except LeaseHeldError:
            raise
        except Exception as error:  # every store has errors of its own
            if not self._warned:
                self._warned = True
                reason = (str(error).splitlines() or [repr(error)])[0]
                self._post(Warned(message=f"an old checkpoint cannot be deleted ({reason}); each later one tries it again"))
        self._post(CheckpointCommitted(name=name, step=step))
        return name
