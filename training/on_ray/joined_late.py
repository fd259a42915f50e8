"""Does this rank's node see the storage of the run? A node that joined after the driver had asked all of them was not asked."""

from __future__ import annotations

import socket

from penstock.errors import PreflightError
from penstock.storage import Storage

__all__ = ["leave_mark", "must_see_mark"]

_MARK = "seen-by-all.json"


def leave_mark(run_storage: Storage, attempt: int) -> None:
    """Write, in the driver, what every rank must be able to read."""
    run_storage.write_json(_MARK, {"attempt": attempt})


def must_see_mark(run_storage: Storage, attempt: int) -> None:
    """Look for the driver's mark from a rank.

    Raises:
        PreflightError: it is not there: checkpoints written here would be lost, and those of others are not found.
    """
    try:
        found = run_storage.read_json(_MARK)["attempt"]
    except FileNotFoundError:
        found = None
    if found != attempt:
        raise PreflightError(
            f"{socket.gethostname()}, a node that joined the Ray cluster after its nodes were asked, does not see "
            f"{run_storage.uri('')}, where this run is kept",
            next_step="set `storage` to s3:// or to a folder that every node mounts under the same path; or take that node out "
            "(`ray stop` there), and run the same command: it continues",
        )
