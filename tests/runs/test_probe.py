"""`penstock probe` on a real project whose rows are prepared slowly in every epoch: the place is named, and what is faster."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.flows.verbs.probe.knobs import ADVICE
from tests.drills.project import make_project
from tests.runs.forked import Command

pytestmark = pytest.mark.drill


def test_a_stream_with_a_slow_step_is_probed_and_a_cache_is_faster(tmp_path: Path) -> None:
    file = make_project(tmp_path / "project", files=6, workers=2)
    step = file.parent / "transforms.py"
    step.write_text("import time\n\n" + step.read_text().replace("def scale(batch):", "def scale(batch):\n    time.sleep(0.5)"))
    streams = "materialize: {unit_bytes: 1, cache: none}\nshuffle: {seed: 5, mode: windowed, window_rows: 300}\n"
    text = file.read_text().replace("materialize: {unit_bytes: 1}\n", "").replace("shuffle: {seed: 5}\n", streams)
    file.write_text(text)
    plot = tmp_path / "probe.png"
    said = Command("probe", str(file), "--budget-s", "1", "--plot", str(plot), "--json").finish()
    assert said["place"] == "transform", said["time"]
    assert said["advice"] == ADVICE["transform"]
    assert len(said["ranks"]) == 2 and all(rank["rows"] for rank in said["ranks"])
    assert said["longest_s"] > 0.4, "a window waits for the step"
    (tried,) = said["tried"]
    assert tried["values"] == {"materialize.cache": "disk"} and tried["factor"] > 2
    assert said["fastest"]["spec"] == "materialize: {cache: disk}"
    assert plot.stat().st_size > 10_000

    assert Command("status", str(file), "--json").finish()["runs"] == [], "no run was begun"
    assert not list((file.parent / ".penstock").glob("probes/*"))
    planned = Command("plan", str(file), "--json", "--set", "materialize.cache=disk").finish()
    found = {stage["name"]: stage["action"] for stage in planned["stages"]}
    assert found["materialize"] == "reuse", "the next run has the rows that were prepared"
