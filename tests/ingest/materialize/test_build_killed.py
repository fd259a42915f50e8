"""A process that is killed while it materializes loses the unit in its hands and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.ingest.manifest import manifest_path
from tests.ingest.preparing import HOLDS, Source, counting_code, killed_in

UNITS = 12


def make_source(folder: Path) -> Source:
    """A source of twelve units of five rows."""
    files = {f"train/{i:02d}.parquet": pa.table({"x": np.full(5, float(i)), "y": np.arange(5) % 2}) for i in range(UNITS)}
    target = counting_code(folder, HOLDS)
    step = {"map_batches": {"function": target, "params": {"log": str(folder / "calls")}}}
    present = {} if (folder / "train").exists() else files
    return Source.of(folder, present, [step], label="y")


def test_after_kill_9_only_the_running_unit_is_made_again(tmp_path: Path) -> None:
    make_source(tmp_path)
    for call, committed in ((4, 3), (9, 7)):
        made = "tests.ingest.materialize.test_build_killed:make_source"
        assert killed_in(call, made, tmp_path, committed) == committed
        assert not (tmp_path / "state" / manifest_path("key")).exists()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("state/units/*/unit.json")}
    source = make_source(tmp_path)
    manifest = source.materialize()
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) == UNITS + 2 and len(set(calls)) == UNITS, "each kill cost the one unit in hand"
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert source.column(manifest, "x").tolist() == [float(i) for i in range(UNITS) for _ in range(5)]
    assert not list(tmp_path.glob("state/units/*/.build-*"))


def test_the_dataset_after_kills_equals_one_made_in_one_go(tmp_path: Path) -> None:
    interrupted, straight = tmp_path / "a", tmp_path / "b"
    for folder in (interrupted, straight):
        folder.mkdir()
    source = make_source(interrupted)
    whole = source.materialize()
    for unit in whole.shards.units[::2]:
        (interrupted / f"state/units/{unit}/unit.json").unlink()
    for unit in whole.shards.units[1::4]:
        source.storage.delete(f"units/{unit}")
    (interrupted / "state" / manifest_path("key")).unlink()
    again = source.materialize()
    assert again == whole
    other = make_source(straight).materialize()
    assert [shard.digest for shard in other.shards] == [shard.digest for shard in again.shards]
    assert other.content_digest == again.content_digest
