"""A process that is killed while it materializes loses the unit in its hands and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.ingest.manifest import manifest_path
from tests import ROOT
from tests.ingest.preparing import Source, counting_code

UNITS = 12


def make_source(folder: Path) -> Source:
    """A source of twelve units; each takes a moment, so that a kill finds one at work."""
    files = {f"train/{i:02d}.parquet": pa.table({"x": np.full(5, float(i)), "y": np.arange(5) % 2}) for i in range(UNITS)}
    target = counting_code(folder, "time.sleep(0.05)")  # five rows would be done before the kill
    step = {"map_batches": {"function": target, "params": {"log": str(folder / "calls")}}}
    present = {} if (folder / "train").exists() else files
    return Source.of(folder, present, [step], label="y")


def committed(folder: Path) -> set[Path]:
    return set(folder.glob("state/units/*/unit.json"))


def test_after_kill_9_only_the_unit_in_hand_is_made_again(tmp_path: Path) -> None:
    make_source(tmp_path)
    program = (
        "from pathlib import Path; from tests.ingest.materialize.test_build_killed import make_source; "
        f"make_source(Path({str(tmp_path)!r})).materialize()"
    )
    done: list[int] = []
    for target in (3, 7):
        child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
        deadline = time.monotonic() + 120
        while len(committed(tmp_path)) < target and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.005)  # the child must not know that it is watched, so its files are all there is to look at
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        done.append(len(committed(tmp_path)))
        assert target <= done[-1] < UNITS
        assert not (tmp_path / "state" / manifest_path("key")).exists()
    before = {path: path.stat().st_mtime_ns for path in committed(tmp_path)}
    calls_before = (tmp_path / "calls").read_text().split()
    source = make_source(tmp_path)
    manifest = source.materialize()
    calls = (tmp_path / "calls").read_text().split()
    assert len(calls) - len(calls_before) == UNITS - done[-1]
    # Each kill cost at most the one unit in hand.
    assert UNITS <= len(calls) <= UNITS + 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert source.column(manifest, "x").tolist() == [float(i) for i in range(UNITS) for _ in range(5)]
    assert not list(tmp_path.glob("state/units/*/.build-*"))


def test_the_dataset_after_kills_equals_one_made_in_one_go(tmp_path: Path) -> None:
    interrupted, straight = tmp_path / "a", tmp_path / "b"
    for folder in (interrupted, straight):
        folder.mkdir()
    source = make_source(interrupted)
    whole = source.materialize()
    for unit in whole.units[::2]:
        (interrupted / f"state/units/{unit.key}/unit.json").unlink()
    for unit in whole.units[1::4]:
        source.storage.delete(f"units/{unit.key}")
    (interrupted / "state" / manifest_path("key")).unlink()
    again = source.materialize()
    assert again == whole
    other = make_source(straight).materialize()
    assert [shard.digest for shard in other.shards] == [shard.digest for shard in again.shards]
    assert other.content_digest == again.content_digest
