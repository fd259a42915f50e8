"""How is the outcome of an attempt read from the checkpoints on storage?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.job import TrainJob, TrainOutcome

__all__ = ["job_checkpoints", "outcome_of"]


def job_checkpoints(job: TrainJob) -> CheckpointStore:
    """Return the checkpoints of the run that `job` belongs to."""
    return CheckpointStore(job.run_storage, job.spec.checkpoint)


def outcome_of(
    job: TrainJob,
    status: Literal["finished", "interrupted"],
    *,
    exactness: str | None = None,
    resumed_from_step: int | None = None,
    restarts: int = 0,
    warnings: Sequence[str] = (),
    returned: Sequence[Any] = (),
) -> TrainOutcome:
    """Describe an attempt by its newest and its best checkpoint. Runs in the driver.

    Args:
        exactness: of the weights; None takes the one that the newest checkpoint records.
        resumed_from_step: of the checkpoint that the attempt began with.
        restarts: number of worker groups that died and were started again.
        warnings: of the attempt.
        returned: what a user's function returned on each rank.
    """
    store = job_checkpoints(job)
    newest, best = next(iter(store.committed()), None), store.best()
    chosen = best or newest
    metrics = chosen.manifest.metrics if chosen else {}
    return TrainOutcome(
        status=status,
        step=newest.manifest.step if newest else 0,
        epoch=newest.manifest.epoch if newest else 0,
        position=newest.manifest.position if newest else 0,
        checkpoint=newest.name if newest else None,
        best_checkpoint=best.name if best else None,
        model_step=chosen.manifest.step if chosen else 0,
        weights_digest=chosen.manifest.weights_digest if chosen else "",
        metrics={name: value for name, value in metrics.items() if value is not None},
        exactness=exactness or (newest.manifest.exactness if newest else "bit-exact"),
        resumed_from_step=resumed_from_step,
        restarts=restarts,
        warnings=list(warnings),
        returned=None if all(each is None for each in returned) else list(returned),
        world_size=job.spec.workers,
    )
