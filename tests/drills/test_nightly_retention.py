"""Real nights with `retention: {keep_runs: 1}`: the run before goes and is still read of; a run that goes back is whole."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from penstock.flows.spec_file import load_spec
from penstock.storage import Storage
from tests.runs.forked import Command
from tests.runs.nights import ADDED, add_flipped_night, make_nights

pytestmark = pytest.mark.drill


def with_checkpoints(storage: Storage) -> set[str]:
    return {path.split("/")[1] for path in storage.tree("runs") if "/checkpoints/" in path}


def test_cleaned_run_is_readable_and_going_back_gives_its_weights(tmp_path: Path) -> None:
    file = make_nights(tmp_path / "project")
    # Without an alias: the run whose model is `previous` would stay, for a rollback.
    text = file.read_text().replace("{name: nightly}", "{name: nightly, alias: null}")
    file.write_text(f"{text}retention: {{keep_runs: 1}}\n")
    state = Storage(load_spec(file).spec.storage)

    def said(*words: str, code: int = 0) -> Any:
        return Command(*words, "--json").finish(code)

    first = said("run", str(file))
    add_flipped_night(file)
    second = said("run", str(file))
    assert first["freed_bytes"] == 0 and second["freed_bytes"] > 300_000
    assert with_checkpoints(state) == {second["run"]}

    here = ("--file", str(file))
    assert [entry["cleaned"] is not None for entry in said("log", str(file))["attempts"]] == [True, False]
    compared = said("compare", first["run"], "last", *here)
    assert compared["findings"][0].startswith(f"{first['run']} was cleaned on ") and compared["same_rows"] == []
    assert compared["data"]["rows"][0]["before"] > 0
    refused = said("rows", first["run"], "--step", "1", *here, code=4)
    assert f"by retention of run {second['run']}" in refused["error"]["message"]
    assert len(said("rows", "last", "--step", "1", *here)["rows"]) > 3
    with contextlib.chdir(tmp_path):
        page = tmp_path / said("report", first["run"], *here)["page"]
    assert "figures, answers and checkpoints are gone" in page.read_text()

    (file.parent / "data" / "train" / ADDED).unlink()
    back = Command("run", str(file), "--json")
    back.wait_for("training", lambda: len(state.list("runs")) == 3)
    beside = said("clean", str(file), "--keep-runs", "1")
    assert beside["freed"] == [] and "is at work" in beside["rows_stay"]
    third = back.finish()
    assert third["run"] not in (first["run"], second["run"]) and third["weights_digest"] == first["weights_digest"]
    assert with_checkpoints(state) == {third["run"]}
    assert {stage["action"] for stage in said("plan", str(file))["stages"]} == {"reuse"}
