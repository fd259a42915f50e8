"""How is a shard read that was not made when training began (`materialize.overlap`)? The feed waits for its unit's record."""

from __future__ import annotations

import time

from penstock.errors import DataError, ServiceError, ShardError
from penstock.ingest.manifest import UNIT_RECORD, ShardInfo, unit_path
from penstock.storage import Storage

__all__ = ["await_shard"]

LOOK_S = 0.05, 2.0
"""Seconds between two looks: at first, and at most."""

SILENCE_S = 30.0
"""A wait that is longer is printed."""

MOST_S = 24 * 3600.0
"""The driver ends the workers if the preparing fails; this is for a record that was deleted later."""


def await_shard(storage: Storage, expected: ShardInfo, most_s: float = MOST_S) -> ShardInfo:
    """Wait until the unit of a pending shard is committed, and return the shard with its size and digest.

    Raises:
        DataError: the unit has another shard, or one of other rows.
        ServiceError: it is not committed after `most_s` seconds.
    """
    path, began_s, pause_s, is_printed = unit_path(expected.unit, UNIT_RECORD), time.monotonic(), LOOK_S[0], False
    while True:
        try:
            found = [ShardInfo.model_validate(shard) for shard in storage.read_json(path)["shards"]]
            break
        except FileNotFoundError:
            waited_s = time.monotonic() - began_s
        except (KeyError, ValueError) as error:  # a ValidationError is a ValueError
            raise ShardError(f"{storage.uri(path)} cannot be read: {error}") from error
        if waited_s > most_s:
            raise ServiceError(
                f"{storage.uri(path)} is not there after {waited_s:.0f} s: the unit is not committed",
                next_step="run the same command again: it prepares the missing units, and continues from the newest checkpoint",
            )
        if waited_s > SILENCE_S and not is_printed:
            is_printed = True
            print(f"waits for rows of {expected.split} that are being prepared: {storage.uri(path)}", flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_S[1])
    shard = next((shard for shard in found if shard.path == expected.path), None)
    of_split = [shard.rows for shard in found if shard.split == expected.split]
    if shard is None or shard.rows != expected.rows:
        raise DataError(
            f"materialize.overlap: {storage.uri(expected.path)} was expected to have {expected.rows:,} rows; the shards of the "
            f"unit's rows of {expected.split} have {of_split}",
            next_step=(
                "raise materialize.shard_bytes, since rows that differ in size need a shard for all of a unit"
                if sum(of_split) == expected.rows
                else "let the functions in preprocess return as many rows as they get"
            )
            + ", or set materialize.overlap: false",
        )
    return shard
