"""A transform of another package, the one that docs/extend/transform.md shows: installed, used, described and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from penstock.flows.spec_file import schema_json
from penstock.ingest.preprocess.transform_spec import TransformSpec
from tests import ROOT
from tests.plugin_package import install_package

PAGE = (ROOT / "docs" / "extend" / "transform.md").read_text(encoding="utf-8")

FAILING = """

class Fails(ClipQuantile):
    \"\"\"Always.\"\"\"

    learns = False

    def apply(self, rows, fitted, data, functions):
        return 1 / 0
"""

PIPELINE = """\
name: clipped
data: {format: parquet, train: rows.parquet, label: label}
preprocess:
  - clip_quantile: {columns: [x], share: 0.25}
train: {recipe: model.py:Line, epochs: 1, batch_rows: 8, cpus_per_worker: 0.5}
"""

MODEL = """\
from torch import nn


class Line:
    def build_model(self, schema):
        return nn.Linear(1, 1)

    def loss(self, model, batch):
        return (model(batch["x"][:, None].float())[:, 0] - batch["label"]).square().mean()
"""

X = np.arange(33.0)
"""Quartiles 8 and 24."""


def block(language: str) -> str:
    return PAGE.split(f"```{language}\n")[1].split("```")[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's package is installed, with a second transform that fails."""
    entry = block("toml").strip().splitlines()[1]
    entries = f'{entry}\nfails = "acme_clip:Fails"'
    return install_package(tmp_path_factory.mktemp("acme"), "penstock.transforms", entries, block("python") + FAILING)


SHOWN = """
import json, runpy, sys
from penstock.ingest.preprocess.transform_spec import TransformSpec
step = TransformSpec.model_validate({"imputer": {"columns": ["a"]}})
unused = [step.model_dump(mode="json"), "acme_clip" in sys.modules]

from penstock.errors import DataError, SpecError
from penstock.flows.spec_file import load_spec, schema_json
try:
    load_spec(sys.argv[1])
except SpecError as error:
    problems = error.problems

from penstock.tasks.records.keys import stage_keys
inputs = stage_keys(load_spec(sys.argv[2]).project, lambda *_: None)["preprocess"].inputs

reference = runpy.run_path("docs/make_spec_reference.py")["reference"]()

import pyarrow
from tests.ingest.preparing import transform_table
try:
    transform_table(pyarrow.table({"x": [1.0, 2.0]}), [{"fails": {"columns": ["x"]}}])
except DataError as error:
    failed = [error.message, *error.problems, error.next_step]

schema = json.loads(schema_json())
parts = dict(unused=unused, problems=problems, inputs=inputs, reference=reference, failed=failed, schema=schema)
print(json.dumps(parts))
"""


@pytest.fixture(scope="module")
def shown(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process shows of the package and of a pipeline file that uses it; another one would import it all again."""
    folder = tmp_path_factory.mktemp("clipped")
    pq.write_table(pa.table({"x": X, "label": X / 2}), folder / "rows.parquet")
    (folder / "model.py").write_text(MODEL)
    (folder / "pipeline.yaml").write_text(PIPELINE)
    wrong = tmp_path_factory.mktemp("wrong") / "pipeline.yaml"
    wrong.write_text(PIPELINE.replace("share: 0.25", "share: 0.75").replace("[x]", "[x], shares: 1"))
    path = os.pathsep.join([str(site), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "-c", SHOWN, str(wrong), str(folder)], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_unknown_transform_lists_known_ones() -> None:
    with pytest.raises(ValidationError, match=r"no transform 'clip_quantile'; there are standard_scaler, .*, map_batches"):
        TransformSpec.model_validate({"clip_quantile": {"columns": "*"}})
    with pytest.raises(ValidationError, match="did you mean 'label_encoder'"):
        TransformSpec.model_validate("label_encodr")


def test_plugin_options_are_checked_at_their_line(shown: dict[str, Any]) -> None:
    assert shown["problems"] == [
        "pipeline.yaml:4: preprocess.0.clip_quantile.share: 0.75: input should be less than 0.5",
        "pipeline.yaml:4: preprocess.0.clip_quantile.shares: unknown key; did you mean 'share'?",
    ]


def test_plugin_is_in_schema_and_reference(shown: dict[str, Any]) -> None:
    assert "clip_quantile" not in schema_json()
    whole, short = shown["schema"]["$defs"]["TransformSpec"]["anyOf"]
    reference = shown["reference"]
    said = "Values beyond two quantiles of the train split become those quantiles."
    assert whole["properties"]["clip_quantile"]["description"] == said
    assert "clip_quantile" in short["enum"]
    assert f"| `clip_quantile` | section \\| null | none |  | {said} |" in reference
    assert "## `preprocess.clip_quantile`, `preprocess.fails`\n\nNumeric columns whose extreme values are clipped." in reference


def test_plugin_version_is_in_stage_key(shown: dict[str, Any]) -> None:
    inputs = shown["inputs"]
    assert inputs["version.transform.clip_quantile"] == "acme-penstock==1.2"
    assert inputs["preprocess.0"] == {"clip_quantile": {"columns": ["x"], "share": 0.25}}


def test_plugin_installed_is_not_imported_unless_used(shown: dict[str, Any]) -> None:
    written = TransformSpec.model_validate({"imputer": {"columns": ["a"]}}).model_dump(mode="json")
    assert written == {"imputer": {"columns": ["a"], "strategy": "mean", "fill_value": None}}
    assert shown["unused"] == [written, False]


def test_plugin_error_names_transform_package_and_rows(shown: dict[str, Any]) -> None:
    message, given, advice = shown["failed"]
    assert message.startswith("preprocess[0].fails of package acme-penstock==1.2 raised ZeroDivisionError: division by zero (")
    assert "acme_clip.py, line " in message
    assert given == "it was given part-0.parquet, row 100 (from 0) and the 1 row after it"
    assert "preprocess.fails" in advice
