"""`penstock probe` on a real project whose rows are prepared slowly in every epoch: place and advice are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.flows.verbs.probe.probe import ADVICE
from tests.drills.project import make_project
from tests.runs.forked import Command

pytestmark = pytest.mark.drill


def test_probe_of_slow_stream_names_place_and_faster_cache(tmp_path: Path) -> None:
    file = make_project(tmp_path / "project", files=6, workers=2)
    step = file.parent / "transforms.py"
    step.write_text("import time\n\n" + step.read_text().replace("def scale(batch):", "def scale(batch):\n    time.sleep(0.5)"))
    streams = "materialize: {unit_bytes: 1, cache: none}\nshuffle: {seed: 5, mode: windowed, window_rows: 300}\n"
    text = file.read_text().replace("materialize: {unit_bytes: 1}\n", "").replace("shuffle: {seed: 5}\n", streams)
    file.write_text(text)
    said = Command("probe", str(file), "--json").finish()
    assert said["place"] == "tasks", said["time"]
    assert said["advice"] == ADVICE["tasks"]
    assert len(said["ranks"]) == 2 and all(rank["rows"] for rank in said["ranks"])
    assert said["longest_s"] > 0.4, "a window waits for the step"
    assert "materialize.cache: disk" in said["advice"]
    tried = Command("probe", str(file), "--set", "materialize.cache=disk", "--json").finish()
    assert tried["rows_per_s"] > 2 * said["rows_per_s"]

    assert Command("status", str(file), "--json").finish()["runs"] == [], "no run was begun"
    assert not list((file.parent / ".penstock").glob("probes/*"))
    planned = Command("plan", str(file), "--json", "--set", "materialize.cache=disk").finish()
    found = {stage["name"]: stage["action"] for stage in planned["stages"]}
    assert found["materialize"] == "reuse", "the next run has the rows that were prepared"
