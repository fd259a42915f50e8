"""Why was last night worse? Two real nights, the second with a file of flipped labels, and the commands that explain them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow.tracking import MlflowClient
from typer.testing import CliRunner

from penstock.errors import SpecError
from penstock.flows.cli import app
from penstock.flows.history.comparison import compare_runs
from penstock.flows.history.log import collect_log
from penstock.flows.history.report import throughput_sentence
from penstock.flows.history.rows import rows_of_step
from penstock.flows.history.which_run import RunNames
from penstock.training.events import Point
from tests.runs.forked import Command
from tests.runs.nights import ADDED, FIRST

pytestmark = [pytest.mark.slow, pytest.mark.drill]


def said(*words: str | Path) -> str:
    """What a command prints for a person; in this process, for these commands start nothing."""
    answer = CliRunner().invoke(app, [str(word) for word in words])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_a_run_says_why_each_stage_ran_and_keeps_it(nights_file: Path, nights: dict[str, Any]) -> None:
    because = {stage["name"]: stage["because"] for stage in nights["second"]["stages"]}
    assert because["read"] == [f"files: added train/{ADDED}"]
    assert because["materialize"] == ["preprocess has changed"]
    assert any(line.startswith("rows.train: ") and len(line) == 32 for line in because["train"])  # digests are cut to 8


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
    worse, added = compared["findings"]
    drop = nights["second"]["metrics"]["test/accuracy"] - nights["first"]["metrics"]["test/accuracy"]
    assert f"test/accuracy is worse: {nights['first']['metrics']['test/accuracy']:.4f}" in worse and f"{drop:+.4f}" in worse
    assert "on the 169 rows that both judged" in worse
    assert added.startswith(f"train/{ADDED} was added, 151 rows") and "of class 'benign', where the rows before had" in added
    (test,) = (entry for entry in compared["same_rows"] if entry["split"] == "test")
    accuracy = test["metrics"][0]
    assert accuracy["difference"] == pytest.approx(drop) and accuracy["low"] < drop < accuracy["high"] < 0
    last_lines = nights["second"]["look_at"]
    assert [line.partition(" ")[0] for line in last_lines[:2]] == ["test/accuracy", f"train/{ADDED}"]
    assert worse == last_lines[0] and set(last_lines) <= set(nights["second"]["warnings"]) and not nights["first"]["look_at"]
    validation = next(entry for entry in compared["same_rows"] if entry["split"] == "validation")
    assert validation["rows"] == validation["of"][0] < validation["of"][1]  # the rows of the first night are still held out
    printed = said("compare", "previous", "--file", nights_file)
    assert all(sentence in printed for sentence in compared["findings"])
    answer = Command("compare", "previous", "--file", str(nights_file), "--json").finish()
    assert answer == json.loads(json.dumps(compared))


def test_runs_are_found_by_every_name_of_theirs(nights_file: Path, nights: dict[str, Any]) -> None:
    names, first, second = RunNames(nights_file), nights["first"]["run"], nights["second"]["run"]
    found = {
        name: names.find(name).run for name in ("last", "previous", "best", "1", "models:/nightly/2", "v2", first[-4:], second)
    }
    assert found == {
        "last": second,
        "previous": first,
        "best": first,
        "1": first,
        "models:/nightly/2": second,
        "v2": second,
        first[-4:]: first,
        second: second,
    }
    with pytest.raises(SpecError, match=r"(?s)there is no run 'nigthly'.*penstock log lists the runs"):
        names.find("nigthly")
    with pytest.raises(SpecError, match="are both the run"):
        compare_runs(nights_file, "last", second)


def test_the_rows_of_a_step_are_named_by_file_line_and_values(nights_file: Path, nights: dict[str, Any]) -> None:
    steps = [rows_of_step(nights_file, "last", step) for step in range(10, 19)]  # the second epoch
    assert {step["epoch"] for step in steps} == {2}
    rows = [row for step in steps for row in step["rows"]]
    assert len({(row["file"], row["row"]) for row in rows}) == len(rows) == 281, "an epoch is every row of train once"
    text = {name: (nights_file.parent / "data" / "train" / name).read_text().splitlines() for name in (FIRST, ADDED)}
    for row in rows:
        line = text[row["file"].removeprefix("train/")][row["line"] - 1]
        assert row["values"]["diagnosis"] == line.split(",")[-1]
        assert row["values"]["mean radius"] == float(line.split(",")[0])
    assert len(rows_of_step(nights_file, "last", 10)["rows"]) == steps[0]["num_rows"] == 32
    older = rows_of_step(nights_file, "previous", 3)
    assert (older["run"], older["num_rows"]) == (nights["first"]["run"], 32)
    assert {row["file"] for row in older["rows"]} == {f"train/{FIRST}"}, "the rows of that night, and not of the newest"
    with pytest.raises(SpecError, match="there is no step 109: the run has 1 to 108"):
        rows_of_step(nights_file, "last", 109)
    with pytest.raises(SpecError, match="there is no step 0: the first is 1"):
        rows_of_step(nights_file, "last", 0)
    assert f"train/{rows[0]['file'].removeprefix('train/')}:{rows[0]['line']}  mean radius=" in said(
        "rows", "last", "--step", "10", "--file", nights_file
    )


def test_a_run_is_one_page_that_the_tracked_run_has_too(nights_file: Path, nights: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / f"{nights['second']['run']}.html"
    with contextlib.chdir(tmp_path):
        assert said("report", "last", "--file", nights_file).strip() == page.name
    text = page.read_text()
    parts = (nights["second"]["run"], f"files: added train/{ADDED}", "test/accuracy", "rows a second", "penstock run ")
    for part in (*parts, 'role="img" aria-label="time line of attempt 1"', "rows", "Checkpoints kept"):
        assert part in text, part
    assert text.count("data:image/png;base64") == 8 and "mean radius" in text and "models:/nightly/2" in text
    assert "http" not in text.partition("the environment")[0] and "<script" not in text
    client = MlflowClient(f"sqlite:///{nights_file.parent}/.penstock/mlflow/mlflow.db")
    attached = client.download_artifacts(nights["second"]["mlflow_run_id"], "report.html", str(tmp_path))
    assert Path(attached).read_text() == text


def test_mlflow_shows_the_rows_by_split(nights: dict[str, Any], nights_file: Path, tmp_path: Path) -> None:
    client = MlflowClient(f"sqlite:///{nights_file.parent}/.penstock/mlflow/mlflow.db")
    run = client.get_run(nights["second"]["mlflow_run_id"])
    inputs = {given.tags[0].value: given.dataset for given in run.inputs.dataset_inputs}
    assert len(run.inputs.dataset_inputs) == 3 and inputs.keys() == {"train", "validation", "test"}
    profile = json.loads(inputs["train"].profile)
    assert (profile["num_rows"], profile["files"]) == (281, 2) and sum(profile["classes"].values()) == 281

    def data(name: str) -> Any:
        return json.loads(Path(client.download_artifacts(run.info.run_id, f"data/{name}.json", str(tmp_path))).read_text())

    files = data("files")
    counts = [client.get_run(nights[night]["mlflow_run_id"]).data.metrics["data/rows_left_out"] for night in nights]
    assert counts == [0, 1]
    assert files.keys() == {f"train/{FIRST}", f"train/{ADDED}", "test/test.csv"}
    assert (files[f"train/{ADDED}"]["rows"], len(files[f"train/{ADDED}"]["content"])) == (151, 32)
    assert data("profile")["columns"]["train"].keys() >= {"mean radius", "diagnosis"}
    scaled = [each for step in data("fitted")["steps"] for each in step["columns"] if each["column"] == "mean radius"]
    assert scaled and scaled[0]["center"] > 0
    version = client.get_model_version("nightly", "2")
    assert version.description.startswith("Result: test/accuracy 0.") and f"added train/{ADDED}" in version.description


def test_prefects_list_of_flow_runs_says_what_ran_when_and_how_it_ended(
    nights_file: Path, nights: dict[str, Any], prefect_url: str
) -> None:
    record = next((nights_file.parent / ".penstock" / "runs" / nights["second"]["run"] / "attempts").glob("*.json"))
    flow_run = httpx.get(f"{prefect_url}/flow_runs/{json.loads(record.read_text())['prefect_flow_run_id']}").json()
    accuracy = nights["second"]["metrics"]["test/accuracy"]
    assert (flow_run["state"]["type"], flow_run["state"]["name"]) == ("COMPLETED", "Notable")
    assert "test/accuracy is worse" in flow_run["state"]["message"]
    assert flow_run["name"] == f"{nights['second']['run']} attempt 1: done, test/accuracy {accuracy:.4f}"
    wanted = {"key": {"any_": ["nightly-materialize"]}, "flow_run_id": {"any_": [flow_run["id"]]}}
    (artifact,) = httpx.post(f"{prefect_url}/artifacts/filter", json={"artifacts": wanted}).json()
    assert '"rows left out", "value": "1 (null: mean area: 1)"' in artifact["data"]
    asked = {"logs": {"flow_run_id": {"any_": [flow_run["id"]]}}, "sort": "TIMESTAMP_ASC", "limit": 9}
    said = [entry["message"] for entry in httpx.post(f"{prefect_url}/logs/filter", json=asked).json()]
    assert said[0].startswith("Beginning flow run 'project/pipeline.yaml, 20"), "no name of Prefect's own"
    assert f"a new run: the last run is done, and since then files: added train/{ADDED}" in said
    asked = {"artifacts": {"flow_run_id": {"any_": [flow_run["id"]]}, "key": {"any_": ["nightly-read"]}}}
    (table,) = httpx.post(f"{prefect_url}/artifacts/filter", json=asked).json()
    cells = {row["name"]: row["value"] for row in json.loads(table["data"])}
    assert (cells["because"], cells["files"]) == (f"files: added train/{ADDED}", "3")
    assert f"Changed since the attempt before:\n\n- data: added train/{ADDED}" in table["description"]


def test_the_speed_is_a_sentence() -> None:
    def points(wait_s: float) -> list[Point]:
        values = {"train/rows_per_s": 100.0, "train/step_s": 1.0, "train/data_wait_s": wait_s}
        return [Point(0, step, values) for step in range(1, 13)]

    assert throughput_sentence([]) == ""
    assert "waited for rows 5% of the time: the model takes the time" in throughput_sentence(points(0.05))
    assert "It was data-bound 31% of the time: the workers waited" in throughput_sentence(points(0.31))
    assert "The tasks that prepare them (cache: none) are slower" in throughput_sentence(points(0.31), streamed=True)
