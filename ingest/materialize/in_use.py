"""How do a run that makes a dataset and a cleaning that deletes one stay out of each other's way? Each writes before it looks.

Who makes a dataset notes first which units it will be made of, and looks then at what is being deleted; who deletes notes first
what goes, and looks then at what is used. So at least one of the two sees the other: a unit that is used stays, and one that
goes is waited for, and made again when it is gone.

    datasets/<key>/units.json   the units of a dataset, made or in the making
    room/going.json             datasets and units that are being deleted, believed while the lease room/lease is held
"""

from __future__ import annotations

import time
from collections.abc import Collection

from penstock.lease import current_holder
from penstock.progress import Progress
from penstock.storage import Storage

__all__ = ["ROOM_LEASE", "end_going", "note_going", "noted_units", "use_units"]

ROOM_LEASE = "room/lease"
"""Its holder alone deletes."""

_GOING = "room/going.json"

_LOOK_EVERY_S = 0.2


def use_units(storage: Storage, dataset: str, units: Collection[str], progress: Progress) -> None:
    """Note what a dataset will be made of; returns when none of it is being deleted. Call it before a unit is looked at."""
    _wait_until_gone(storage, "datasets", {dataset}, progress)
    storage.write_json(_units_path(dataset), sorted(units))
    _wait_until_gone(storage, "units", units, progress)


def noted_units(storage: Storage, dataset: str) -> frozenset[str]:
    """What `use_units` noted; empty where nothing is."""
    try:
        return frozenset(map(str, storage.read_json(_units_path(dataset))))
    except (FileNotFoundError, ValueError, TypeError):
        return frozenset()


def note_going(storage: Storage, datasets: Collection[str], units: Collection[str]) -> None:
    """Note what is about to be deleted. The lease must be held; what is used must be looked up after this."""
    storage.write_json(_GOING, {"datasets": sorted(datasets), "units": sorted(units)})


def end_going(storage: Storage) -> None:
    """Note that nothing is being deleted any more."""
    storage.delete(_GOING)


def _wait_until_gone(storage: Storage, kind: str, wanted: Collection[str], progress: Progress) -> None:
    while going := {*wanted} & _going(storage, kind):
        if current_holder(storage, ROOM_LEASE) is None:  # killed: nobody deletes
            return
        progress(0, len(going), kind, "waiting for a cleaning that deletes an old copy")
        time.sleep(_LOOK_EVERY_S)


def _going(storage: Storage, kind: str) -> set[str]:
    try:
        return {*storage.read_json(_GOING)[kind]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()


def _units_path(dataset: str) -> str:
    return f"datasets/{dataset}/units.json"
