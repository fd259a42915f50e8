"""Why was last night worse? Two real nights, the second with a file of flipped labels, and the commands that explain them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.errors import SpecError
from penstock.flows.cli import app
from penstock.flows.verbs.compare.compare import compare_runs
from penstock.flows.verbs.explain import explain_run
from penstock.flows.verbs.log import collect_log
from penstock.flows.verbs.which_run import RunNames
from tests.drills.project import Command
from tests.runs.nights import ADDED

pytestmark = pytest.mark.slow


def said(*words: str | Path) -> str:
    """What a command prints for a person; in this process, for these commands start nothing."""
    answer = CliRunner().invoke(app, [str(word) for word in words])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_a_run_says_why_each_stage_ran_and_keeps_it(nights_file: Path, nights: dict[str, Any]) -> None:
    because = {stage["name"]: stage["because"] for stage in nights["second"]["stages"]}
    assert because["read"] == [f"files: added train/{ADDED}"]
    assert because["materialize"] == ["preprocess has changed"]
    assert "rows.train: others than before" in because["train"]
    (attempt,) = explain_run(nights_file, nights["second"]["run"], "read")["attempts"]
    assert attempt["changed"] == [f"data: added train/{ADDED}"]
    assert [stage["because"] for stage in attempt["stages"]] == [because["read"]]
    assert f"files: added train/{ADDED}" in said("explain", "last", "--file", nights_file)
    with pytest.raises(SpecError, match="'raed' is no stage"):
        explain_run(nights_file, "last", "raed")


def test_the_log_lists_the_nights_by_date(nights_file: Path, nights: dict[str, Any]) -> None:
    first, second = collect_log(nights_file)["attempts"]
    assert [first["run"], second["run"]] == [nights["first"]["run"], nights["second"]["run"]]
    assert (first["changed"], first["better"], first["difference"]) == ([], None, None)
    assert second["metric"] == "test/accuracy" and second["better"] is False
    assert second["difference"] == pytest.approx(second["value"] - first["value"]) and second["difference"] < -0.05
    _, line, changed = said("log", nights_file).splitlines()
    assert second["run"] in line and "worse" in line and "models:/nightly/2" in line
    assert changed == f"    data: added train/{ADDED}"


def test_a_night_of_flipped_labels_is_explained(nights_file: Path, nights: dict[str, Any], tmp_path: Path) -> None:
    compared = compare_runs(nights_file, "previous", "last")
    assert compared["same"] == {"data": False, "code": True, "spec": True, "versions": True}
    worse, added, contradicted = compared["findings"]
    drop = nights["second"]["metrics"]["test/accuracy"] - nights["first"]["metrics"]["test/accuracy"]
    assert f"test/accuracy is worse: {nights['first']['metrics']['test/accuracy']:.4f}" in worse and f"{drop:+.4f}" in worse
    assert "on the 169 rows that both judged" in worse
    assert added.startswith(f"train/{ADDED} was added, 150 rows") and "of class 'benign', where the rows before had" in added
    assert contradicted.startswith(f"The model contradicts the labels of train/{ADDED}")
    (test,) = (entry for entry in compared["same_rows"] if entry["split"] == "test")
    accuracy = test["metrics"][0]
    assert accuracy["difference"] == pytest.approx(drop) and accuracy["low"] < drop < accuracy["high"] < 0
    validation = next(entry for entry in compared["same_rows"] if entry["split"] == "validation")
    assert validation["rows"] == validation["of"][0] < validation["of"][1]  # the rows of the first night are still held out
    assert [len(points) > 10 for points in compared["curves"]["train/loss"]] == [True, True]
    printed = said("compare", "previous", "--file", nights_file)
    assert all(sentence in printed for sentence in compared["findings"])
    answer = Command("compare", "previous", "--file", str(nights_file), "--json").finish()
    assert answer == json.loads(json.dumps(compared))


def test_runs_are_found_by_every_name_of_theirs(nights_file: Path, nights: dict[str, Any]) -> None:
    names, first, second = RunNames(nights_file), nights["first"]["run"], nights["second"]["run"]
    found = {
        name: names.find(name).run
        for name in ("last", "previous", "best", "1", "models:/nightly/2", "candidate", "nightly@candidate", first[-4:], second)
    }
    assert found == {
        "last": second,
        "previous": first,
        "best": first,
        "1": first,
        "models:/nightly/2": second,
        "candidate": second,
        "nightly@candidate": second,
        first[-4:]: first,
        second: second,
    }
    with pytest.raises(SpecError, match=r"(?s)there is no run 'nigthly'.*penstock log lists the runs"):
        names.find("nigthly")
    with pytest.raises(SpecError, match="are both the run"):
        compare_runs(nights_file, "last", second)
