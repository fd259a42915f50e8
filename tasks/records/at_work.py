"""Which runs of a pipeline are at work, and which process chooses the next one?

Several runs of a pipeline may be worked on at a time, each by one process, which holds the run's lease. It takes that while it
holds the lease of the pipeline's name, for the moments in which a run is chosen and recorded: two commands that want the same
never begin it twice.

    pipelines/<name>/lease           of the name
    pipelines/<name>/leases/<run>    of a run; those of dead holders are removed when the next run is chosen
    retention/lease                  of the storage, held while old data are deleted: no run begins meanwhile
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from penstock.errors import LeaseHeldError
from penstock.lease import LeaseHolder, current_holder, delete_left, hold_lease, wait_until_free
from penstock.storage import Storage
from penstock.tasks.records.ledger import lease_path, run_leases

__all__ = ["CLEANUP_LEASE", "choosing_a_run", "holders_of_runs"]

CLEANUP_LEASE = "retention/lease"
"""Held by the one process that deletes old data of the storage; see tasks/retention/clean.py."""


@contextmanager
def choosing_a_run(
    storage: Storage,
    pipeline: str,
    on_lost: Callable[[LeaseHeldError], None] = lambda _error: None,
    on_wait: Callable[[LeaseHolder], None] = lambda _holder: None,
) -> Iterator[list[str]]:
    """Be the only process that chooses, begins or repairs a run of the pipeline, and wait for a cleaning of the storage to end.

    Yields the runs that may be at work: no other process begins one meanwhile.

    Args:
        on_lost: as of `hold_lease`.
        on_wait: called once if that takes more than two seconds.

    Raises:
        LeaseHeldError: a holder that seemed dead, and was not of this machine, lives.
    """
    with hold_lease(storage, lease_path(pipeline), on_lost, brief=True, on_wait=on_wait):
        wait_until_free(storage, CLEANUP_LEASE, on_wait)
        yield delete_left(storage, run_leases(pipeline))


def holders_of_runs(
    storage: Storage, pipeline: str, runs: Sequence[str] | None = None, *, watch: bool = False
) -> dict[str, LeaseHolder]:
    """Map each run at work to its living process, without trials of a sweep.

    Args:
        runs: those that may be at work, if that is known.
        watch: as of `current_holder`.
    """
    folder = run_leases(pipeline)
    names = storage.list(folder) if runs is None else runs
    with ThreadPoolExecutor(64) as pool:  # a dead holder on another machine is watched for 15 s
        found = pool.map(lambda run: current_holder(storage, f"{folder}/{run}", watch=watch), names)
        return {run: holder for run, holder in zip(names, found, strict=True) if holder is not None}
