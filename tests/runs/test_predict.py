"""`penstock predict` with a model that a pipeline has registered: on Ray, killed in the middle, from and to a store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.storage import Storage
from tests import ROOT
from tests.runs.forked import Command

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_prefect")]


def command(
    calm: dict[str, Any], file: Path, source: Path | str, output: Path | str, *more: str, **environment: str
) -> Command:
    words = ("predict", calm["model_uri"], str(source), "--output", str(output), "--file", str(file), "--json")
    return Command(*words, *more, environment=environment)


def store(file: Path) -> str:
    return f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db"


def copies(file: Path, folder: Path, count: int) -> Path:
    """So many files of the rows that `calm` was trained on, without their label."""
    rows = pq.read_table(sorted((file.parent / "data" / "train").iterdir())[0]).drop_columns(["label"])
    folder.mkdir()
    for number in range(count):
        pq.write_table(rows.append_column("id", pa.array(np.arange(rows.num_rows) + number)), folder / f"{number:03}.parquet")
    return folder


@pytest.mark.drill
def test_command_of_the_page_answers_as_the_loaded_model(calm: dict[str, Any], calm_file: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8")
    line, *_ = re.findall(r"^penstock (predict .+)$", page, re.MULTILINE)
    source, out = copies(calm_file, tmp_path / "data", 3), tmp_path / "scores"
    here = {"models:/diagnosis@candidate": "models:/drill@candidate", "data/breast_cancer.csv": str(source), "scores": str(out)}
    words = [here.get(word, word) for word in line.split()]
    said = Command(*words, "--file", str(calm_file), "--json").finish()
    assert said["model_uri"] == calm["model_uri"] and said["total_rows"] == said["rows"] == 3 * 899
    for name in ("manifest.json", "units"):
        assert (out / "_penstock" / name).exists() and f"_penstock/{name}" in page
    part = pq.read_table(out).filter(pa.compute.field("file") == "001.parquet").sort_by("row")
    given = pq.read_table(source / "001.parquet")
    answer = penstock.load_model(calm["model_uri"], store(calm_file)).predict(given)
    assert part.column_names == ["image", "mean", "id", "prediction", "probability", "probabilities", "file", "row"]
    assert part["id"].equals(given["id"]) and part["prediction"].to_pylist() == answer["prediction"].tolist()
    assert np.allclose(part["probability"], answer["probability"], atol=1e-6)
    manifest = Storage(str(out)).read_json("_penstock/manifest.json")
    digests = {name: said[name] for name in ("data_digest", "model_digest", "code_digest")}
    assert {name: manifest[name] for name in ("model", *digests)} == {"model": calm["model_uri"], **digests}
    again = command(calm, calm_file, source, out).finish()
    assert (again["units"], again["total_rows"]) == (0, said["total_rows"])


@pytest.mark.drill
def test_killed_and_repeated_it_scores_each_file_once(calm: dict[str, Any], calm_file: Path, tmp_path: Path) -> None:
    source, out = copies(calm_file, tmp_path / "rows", 60), tmp_path / "scores"
    units = out / "_penstock" / "units"
    killed = command(calm, calm_file, source, out, DRILL_HELD_AT="10")
    killed.wait_for("the first commits", lambda: units.is_dir() and len(list(units.glob("*.json"))) > 1)
    killed.kill()
    there = {unit: unit.stat().st_mtime_ns for unit in units.glob("*.json")}
    assert len(there) < 60 and not (out / "_penstock" / "manifest.json").exists()
    said = command(calm, calm_file, source, out).finish()
    assert said["total_rows"] == pq.read_table(out).num_rows == 60 * 899
    assert said["units"] < 60 and said["files"] == 60
    assert {unit: unit.stat().st_mtime_ns for unit in there} == there, "what was committed stays as it is"


@pytest.mark.drill
def test_rows_of_a_store_are_scored_to_a_store(calm: dict[str, Any], calm_file: Path, tmp_path: Path, s3_bucket: str) -> None:
    bucket, source = Storage(s3_bucket), copies(calm_file, tmp_path / "rows", 3)
    for number in (0, 1):
        bucket.put_file(source / f"{number:03}.parquet", f"in/{number:03}.parquet")
    said = command(calm, calm_file, f"{s3_bucket}/in/", f"{s3_bucket}/out", "--column", "id").finish()
    assert (said["rows"], said["units"]) == (2 * 899, 2)
    bucket.put_file(source / "002.parquet", "in/002.parquet")
    said = command(calm, calm_file, f"{s3_bucket}/in/", f"{s3_bucket}/out", "--column", "id").finish()
    assert (said["rows"], said["units"], said["total_rows"]) == (899, 1, 3 * 899)
    (tmp_path / "out").mkdir()
    for name in bucket.list("out"):
        bucket.get_file(f"out/{name}", tmp_path / "out" / name) if name.endswith(".parquet") else None
    assert pq.read_table(tmp_path / "out").num_rows == 3 * 899


def test_what_is_not_there_is_named_with_its_exit_code(calm: dict[str, Any], calm_file: Path, tmp_path: Path) -> None:
    source = copies(calm_file, tmp_path / "rows", 1)
    no_model = Command("predict", "models:/drill/99", str(source), "--output", str(tmp_path / "out"), "--file", str(calm_file))
    no_input = command(calm, calm_file, tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "file").touch()
    no_output = command(calm, calm_file, source, tmp_path / "file" / "out")
    no_model.process.communicate()
    assert no_model.process.returncode == 3 and "models:/drill/99 cannot be loaded" in no_model.said
    assert "give one that is there (models:/drill@candidate)" in no_model.said
    assert "matches no file" in no_input.finish(code=4)["error"]["message"]
    assert "cannot be written" in no_output.finish(code=3)["error"]["message"]
