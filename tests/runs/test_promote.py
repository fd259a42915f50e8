"""Does the alias move to better models only, and does a rollback last? Four commands on one project, and its tables by hand."""

from __future__ import annotations

import io
from pathlib import Path

import pandas as pd
import pytest
from mlflow.tracking import MlflowClient

from penstock.training.registry.load import load_model
from tests.runs.forked import Command
from tests.runs.nights import make_nights

pytestmark = pytest.mark.drill

POLICY = """\
evaluate:
  slices: [diagnosis, {mean radius: [12, 15]}]
register:
  name: nightly
  promote: {metric: test/accuracy, min_gain: 0.01, floors: {"mean radius>=15": 0.2}}
"""
UNTRAINED = ("--set", "train.epochs=1", "--set", "train.learning_rate=0.000001")


@pytest.mark.usefixtures("shared_prefect")
def test_an_alias_moves_to_better_models_only_and_a_rollback_lasts(tmp_path: Path) -> None:
    file = make_nights(tmp_path / "project")
    file.write_text(file.read_text().replace("register: {name: nightly}\n", POLICY))
    uri = f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)

    def penstock(*words: str) -> dict:  # type: ignore[type-arg]
        return Command(*words, "--json").finish()

    def aliases() -> dict[str, str]:
        return {alias: str(version) for alias, version in client.get_registered_model("nightly").aliases.items()}

    first = penstock("run", str(file), *UNTRAINED)
    assert first["promotion"]["moved"] and "no version held it" in first["promotion"]["reason"]
    command = Command("run", str(file), "--json")
    second = command.finish()
    granted = second["promotion"]
    assert granted["moved"] and granted["holder"] == "1" and granted["rows"] == 169 and granted["low"] > 0
    assert granted["after"] == pytest.approx(second["metrics"]["test/accuracy"])
    assert granted["before"] == pytest.approx(first["metrics"]["test/accuracy"])
    assert granted["reason"] in command.said
    assert client.get_model_version("nightly", "2").tags["penstock.promotion"] == granted["reason"]
    assert aliases() == {"candidate": "2", "candidate-previous": "1"}

    undone = penstock("rollback", "nightly", "--file", str(file))
    assert (undone["version"], undone["rolled_back"]) == ("1", "2")
    assert aliases() == {"candidate": "1", "candidate-previous": "2"}
    command = Command("run", str(file), "--json")
    again = command.finish()
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    assert "alias none: candidate is at version 1" in command.said
    assert aliases() == {"candidate": "1", "candidate-previous": "2"}, "nothing new leaves the alias alone"
    refused = penstock("run", str(file), "--set", "train.epochs=1", "--set", "train.learning_rate=0.000002")["promotion"]
    assert not refused["moved"] and refused["holder"] == "1"
    assert "it is not better" in refused["reason"] or "below register.promote.min_gain" in refused["reason"]
    assert client.get_model_version("nightly", "3").tags["penstock.promotion"] == refused["reason"]
    assert aliases() == {"candidate": "1", "candidate-previous": "2"}, "nothing better leaves the alias alone"

    # The tables of the second run, against the registered model and pandas.
    rows = pd.read_csv(file.parent / "data" / "test.csv")
    answer = load_model("models:/nightly/2", uri).predict(rows)
    rows["right"] = answer["prediction"].to_numpy() == rows["diagnosis"].to_numpy()

    def table(name: str) -> pd.DataFrame:
        path = client.download_artifacts(second["mlflow_run_id"], f"evaluation/{name}", str(tmp_path))
        return pd.read_csv(io.StringIO(Path(path).read_text()))

    found = table("slices.csv").query("split == 'test'").set_index("slice")
    for name, mask in {
        "diagnosis=benign": rows["diagnosis"] == "benign",
        "mean radius<12": rows["mean radius"] < 12,
        "12<=mean radius<15": rows["mean radius"].between(12, 15, inclusive="left"),
        "mean radius>=15": rows["mean radius"] >= 15,
    }.items():
        assert found.loc[name, "rows"] == mask.sum()
        assert found.loc[name, "accuracy"] == pytest.approx(rows[mask]["right"].mean(), abs=1e-6)
    answers = pd.read_feather(file.parent / f".penstock/runs/{second['run']}/answers/test.arrow")
    wrong = answers.nlargest(9, "loss").reset_index()
    assert (wrong["file"] == "test/test.csv").all()
    of_truth = [
        dict(zip(("benign", "malignant"), row, strict=True))[truth]
        for row, truth in zip(answer["probabilities"], rows["diagnosis"], strict=True)
    ]
    assert wrong["row"][0] == pd.Series(of_truth).idxmin()
    assert wrong["target"][0] != wrong["predicted"][0]
