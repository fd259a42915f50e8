"""From which row of which source file does a prepared row come? Two columns of the shards have the answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.ingest.columns.arrays import PROVENANCE_COLUMNS
from penstock.ingest.manifest import UNIT_RECORD, DatasetManifest, unit_path
from penstock.ingest.materialize.unit import UnitRecord
from penstock.ingest.schema import Split
from penstock.storage import Storage

__all__ = ["Sources", "sources_of"]


class Sources(NamedTuple):
    """Source files and rows of some prepared rows."""

    names: tuple[str, ...]
    """Files, relative to their location."""
    files: NDArray[np.int32]
    """Index into `names` of each row."""
    rows: NDArray[np.int64]
    """Row in that file, from 0."""


def sources_of(storage: Storage, manifest: DatasetManifest, split: Split, ids: NDArray[np.int64]) -> Sources:
    """Find the sources of rows of a split by their ascending ids. Reads two columns of the shards that hold them.

    Raises:
        FileNotFoundError: a shard or its unit's record is missing, or none is kept (`cache: none` and `memory`).
        DataError: the table of shards is missing or damaged.
    """
    names: dict[str, int] = {}
    files, lines = np.empty(len(ids), np.int32), np.empty(len(ids), np.int64)
    first = found = 0
    shards = manifest.opened(storage).shards_of(split)
    for number, rows in enumerate(shards.rows.tolist()):
        stop = int(np.searchsorted(ids, first + rows))
        if stop > found:
            shard = shards[number]
            unit = storage.read_record(unit_path(shard.unit, UNIT_RECORD), UnitRecord)
            if unit is None:
                raise FileNotFoundError(f"{storage.uri(shard.path)} is not committed")
            with storage.open(shard.path) as handle, pa.ipc.open_file(handle) as reader:
                schema = reader.schema
                wanted = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(name) for name in PROVENANCE_COLUMNS])
                handle.seek(0)
                with pa.ipc.open_file(handle, options=wanted) as narrow:
                    table = narrow.read_all()
            here = ids[found:stop] - first
            index = np.array([names.setdefault(name, len(names)) for name in unit.files], np.int32)
            files[found:stop] = index[table.column(PROVENANCE_COLUMNS[0]).to_numpy()[here]]
            lines[found:stop] = table.column(PROVENANCE_COLUMNS[1]).to_numpy()[here]
            found = stop
        first += rows
    if found < len(ids):
        raise FileNotFoundError(f"no shard holds row {int(ids[found]):,} of {split}")
    return Sources(tuple(names), files, lines)
