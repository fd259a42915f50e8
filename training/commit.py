"""How does a snapshot become a checkpoint that counts? In this order, whichever process does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.errors import CheckpointError
from penstock.training.checkpoint import CheckpointStore, Snapshot, StoredFile, Tensors
from penstock.training.journal import JournalWriter, Point

__all__ = ["commit"]


def commit(
    store: CheckpointStore,
    journal: JournalWriter,
    snapshot: Snapshot[Tensors],
    points: Iterable[Point],
    check: Callable[[], None] = lambda: None,
    training_written: Callable[[int], StoredFile] | None = None,
) -> str:
    """Write the files, check, seal the points, commit, and delete what is too old.

    Args:
        store: where to.
        journal: where metric points are sealed.
        snapshot: what is written.
        points: the metric points up to the snapshot's step that no earlier checkpoint sealed.
        check: raises, and then nothing counts that was written.
        training_written: as in `CheckpointStore.write`.

    Returns:
        The checkpoint's name.

    Raises:
        CheckpointError: the storage refuses.
        PenstockError: `check` refuses.
    """

    def seal() -> None:
        check()
        # Before the commit: a checkpoint whose points are not durable would leave a gap that no replay can fill.
        for point in points:
            journal.add(point)
        journal.seal(snapshot.facts.step)

    checkpoint = store.write(snapshot, seal, training_written)
    try:
        store.prune()
    except Exception as error:  # every store has errors of its own
        raise CheckpointError(f"cannot remove an old checkpoint: {type(error).__name__}: {error}") from error
    return checkpoint.name
