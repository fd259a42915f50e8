"""Stage keys: what must change them does, what must not does not, and the difference is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.config import OnResume, resume_rules
from penstock.errors import SpecError
from penstock.flows.spec_file import load_spec
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import FeedSchema
from penstock.tasks.project import Project
from penstock.tasks.records.keys import StageKey, changed_inputs, stage_keys
from penstock.training.checkpoint.manifest import MODEL as WEIGHTS
from penstock.training.registry.registry import WEIGHTS_TAG
from penstock.training.spec import TrainSpec
from penstock.training.tracking.mlflow_backend import connect

PIPELINE = """\
name: keys
data: {format: csv, train: rows/, label: y}
preprocess:
  - map_batches: transforms.py:scale
train: {recipe: model.py:Net, batch_rows: 8}
"""
TRANSFORMS = "from helpers import factor\n\n\ndef scale(batch):\n    batch['x'] = batch['x'] * factor()\n    return batch\n"
HELPERS = "def factor():\n    return 2.0\n\n\ndef unrelated():\n    return 1\n"
MODEL = "class Net:\n    def build_model(self, schema): ...\n    def loss(self, model, batch): ...\n"


def make(folder: Path) -> Path:
    (folder / "rows").mkdir()
    (folder / "rows" / "a.csv").write_text("x,y\n1,0\n2,1\n")
    (folder / "transforms.py").write_text(TRANSFORMS)
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "model.py").write_text(MODEL)
    (folder / "pipeline.yaml").write_text(PIPELINE)
    return folder / "pipeline.yaml"


def outputs(order: str = "o", **rows: str) -> dict[str, dict[str, Any]]:
    """What the stages before training left on record, of these rows."""
    digests = {"train": "t", "validation": "v", "test": "h"} | rows
    manifest = DatasetManifest(key="k", feed_schema=FeedSchema(columns=()), rows={}, content_digest="", split_digests=digests)
    return {"read": {}, "preprocess": {}, "materialize": manifest.model_dump(mode="json"), "shuffle": {"fingerprint": order}}


PREPARED = outputs()


def keys_of(file: Path, *overrides: str, recorded: Mapping[str, dict[str, Any]] = PREPARED) -> dict[str, StageKey]:
    loaded = load_spec(file, overrides)
    return stage_keys(loaded.project, lambda stage, key: recorded.get(stage))


def changed(old: dict[str, StageKey], new: dict[str, StageKey]) -> set[str]:
    return {stage for stage in old if old[stage].key != new[stage].key}


def test_equal_inputs_give_equal_keys(tmp_path: Path) -> None:
    file = make(tmp_path)
    assert changed(keys_of(file), keys_of(file)) == set()


def test_helper_in_other_file_changes_key_and_is_named(tmp_path: Path) -> None:
    file = make(tmp_path)
    before = keys_of(file)
    (tmp_path / "helpers.py").write_text(HELPERS.replace("2.0", "3.0"))
    after = keys_of(file)
    assert changed(before, after) == {"preprocess", "materialize", "shuffle", "register"}
    named = changed_inputs(before["preprocess"].inputs, after["preprocess"].inputs)
    assert named == ["code: changed helpers.py:factor"]


def test_data_config_code_is_in_the_train_key(tmp_path: Path) -> None:
    file = make(tmp_path)
    file.write_text(PIPELINE.replace("recipe: model.py:Net, batch_rows: 8", "loop: loop.py:loop, datasets: loop.py:shares"))
    code = "import ray.train\n\n\ndef loop(config): ...\n\n\ndef shares():\n    return ray.train.DataConfig(['train'])\n"
    (tmp_path / "loop.py").write_text(code)
    before = keys_of(file)
    (tmp_path / "loop.py").write_text(code.replace("'train'", "'test'"))
    after = keys_of(file)
    assert "train" in changed(before, after) and "shuffle" not in changed(before, after)
    assert changed_inputs(before["train"].inputs, after["train"].inputs) == ["code: changed loop.py:shares"]


def test_registered_start_counts_by_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, database = make(tmp_path), f"sqlite:///{tmp_path}/secret-of-the-store.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    client, experiment = connect(database, "p")
    client.create_registered_model("m")
    (weights := tmp_path / "logged" / "artifacts" / WEIGHTS).parent.mkdir(parents=True)
    weights.touch()
    for number, digest in enumerate(("a", "b", "a"), 1):
        model = client.create_logged_model(experiment, "m", tags={WEIGHTS_TAG: digest})
        client.log_model_artifacts(model.model_id, str(tmp_path / "logged"))
        client.create_model_version("m", model.artifact_location)
        client.set_registered_model_alias("m", "champion", str(number))
    found = {model: keys_of(file, f"train.start_from=models:/m{model}") for model in ("/1", "/2", "/3", "@champion")}
    assert changed(found["/1"], found["/3"]) == changed(found["@champion"], found["/3"]) == set()
    assert changed(found["/1"], found["/2"]) == {"train", "evaluate", "register"}
    assert changed_inputs(found["/1"]["train"].inputs, found["/2"]["train"].inputs) == ["start_from: a -> b"]
    assert "secret" not in json.dumps(found["/1"]["train"].inputs)
    monkeypatch.setattr(Project, "registry", "of a package that cannot give weights")
    with pytest.raises(SpecError, match="registry 'mlflow' cannot give weights"):
        keys_of(file, "train.start_from=models:/m/1")


def test_code_of_one_key_is_named_by_files() -> None:
    assert changed_inputs({}, {"code.a.py:f": {"a.py": "1f0e", "b.py": "77aa"}}) == ["code: added a.py, b.py"]
    assert changed_inputs({"code.a.py:f": {"a.py": "1f0e"}}, {}) == ["code: removed a.py"]
    assert changed_inputs({"limits": None}, {"limits": {}}) == ["limits: (none) -> {}"]


def test_file_named_by_code_changes_key_and_is_named(tmp_path: Path) -> None:
    file = make(tmp_path)
    (tmp_path / "words.txt").write_text("one")
    (tmp_path / "model.py").write_text(MODEL + "    words = open('words.txt')\n")
    before = keys_of(file)
    (tmp_path / "words.txt").write_text("two")
    after = keys_of(file)
    assert changed(before, after) == {"train", "evaluate", "register"}
    named = changed_inputs(before["train"].inputs, after["train"].inputs)
    assert named == ["code: changed words.txt"]


IN_PARAMS = "{function: 'transforms.py:scale', params: {vocab: words.txt}}"


@pytest.mark.parametrize(
    ("override", "stage", "code"),
    [
        ("train.params={vocab: words.txt}", "train", "model.py:Net"),
        (f"preprocess=[{{map_batches: {IN_PARAMS}}}]", "preprocess", "transforms.py:scale"),
    ],
)
def test_file_named_by_params_changes_key_and_is_named(tmp_path: Path, override: str, stage: str, code: str) -> None:
    file = make(tmp_path)
    (tmp_path / "words.txt").write_text("one")
    before = keys_of(file, override)
    (tmp_path / "words.txt").write_text("two")
    after = keys_of(file, override)
    assert changed_inputs(before[stage].inputs, after[stage].inputs) == ["code: changed words.txt"]
    assert stage in changed(before, after)


def test_file_of_code_files_changes_all_code_keys(tmp_path: Path) -> None:
    file = make(tmp_path)
    (tmp_path / "words.txt").write_text("one")
    before = keys_of(file, "code.files=['*.txt']")
    (tmp_path / "words.txt").write_text("two")
    after = keys_of(file, "code.files=['*.txt']")
    named = {stage: changed_inputs(before[stage].inputs, after[stage].inputs) for stage in ("preprocess", "train")}
    assert named == {"preprocess": ["code: changed words.txt"], "train": ["code: changed words.txt"]}


def test_comments_and_unrelated_functions_keep_keys(tmp_path: Path) -> None:
    file = make(tmp_path)
    before = keys_of(file)
    (tmp_path / "helpers.py").write_text("# a comment\n" + HELPERS.replace("return 1", "return 99"))
    (tmp_path / "transforms.py").write_text('"""A docstring."""\n' + TRANSFORMS)
    assert changed(before, keys_of(file)) == set()


def test_added_file_changes_read_key_and_is_named(tmp_path: Path) -> None:
    file = make(tmp_path)
    before = keys_of(file)
    (tmp_path / "rows" / "b.csv").write_text("x,y\n3,0\n")
    after = keys_of(file)
    assert "read" in changed(before, after)
    assert changed_inputs(before["read"].inputs, after["read"].inputs) == ["files: added train/b.csv"]


def test_many_files_are_one_input_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tasks.records.keys._FILES_NAMED", 0)
    file = make(tmp_path)
    before = keys_of(file)
    (tmp_path / "rows" / "b.csv").write_text("x,y\n3,0\n")
    after = keys_of(file)
    assert [*after["read"].inputs["files"]] == ["train/*"]
    assert "read" in changed(before, after)
    assert changed_inputs(before["read"].inputs, after["read"].inputs) == ["files: changed train/*"]
    # Train has as many files as are named, whatever another split has.
    monkeypatch.setattr("penstock.tasks.records.keys._FILES_NAMED", 2)
    (tmp_path / "held").mkdir()
    for number in range(3):
        (tmp_path / "held" / f"{number}.csv").write_text(f"x,y\n{number},1\n")
    held = keys_of(file, "data.test=held/")["read"].inputs["files"]
    assert [*held] == ["train/a.csv", "train/b.csv", "test/*"]
    assert keys_of(file)["read"].inputs["files"].items() < held.items()


@pytest.mark.parametrize("location", ["./rows", "rows", "elsewhere/rows/", "rows/*.csv"])
def test_same_files_at_other_address_keep_keys(tmp_path: Path, location: str) -> None:
    file = make(tmp_path)
    before = keys_of(file)
    shutil.copytree(tmp_path / "rows", tmp_path / "elsewhere" / "rows")
    assert changed(before, keys_of(file, f"data.train={location}")) == set()


AFTER = {"train", "evaluate", "register"}


@pytest.mark.parametrize(
    ("now", "overrides", "stages"),
    [
        (outputs(train="t2"), [], AFTER),
        (outputs(order="o2"), [], AFTER),
        (outputs(test="h2"), [], {"evaluate"}),
        (outputs(validation="v2"), [], {"evaluate"}),
        (
            outputs(validation="v2"),
            ["data.validation=rows/a.csv", "data.train=more/", "train.checkpoint.best.metric=val/loss"],
            AFTER,
        ),
        ({**PREPARED, "preprocess": {"other": 1}}, [], {"register"}),
    ],
)
def test_train_key_needs_train_rows_evaluate_key_held_out(
    tmp_path: Path, now: dict[str, Any], overrides: list[str], stages: set[str]
) -> None:
    file = make(tmp_path)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.csv").write_text("x,y\n3,0\n")
    assert changed(keys_of(file, *overrides), keys_of(file, *overrides, recorded=now)) == stages


def test_train_key_is_empty_without_prepared_rows(tmp_path: Path) -> None:
    unknown = {stage for stage, key in keys_of(make(tmp_path), recorded={}).items() if not key.key}
    assert unknown == {"train", "evaluate", "register"}


def test_checkpoint_schedule_keeps_train_key(tmp_path: Path) -> None:
    file = make(tmp_path)
    assert (
        changed(keys_of(file), keys_of(file, "train.checkpoint.every_s=1", "train.retries=0", "train.checkpoint.keep=9"))
        == set()
    )
    assert changed(keys_of(file), keys_of(file, "train.epochs=2")) == {"train", "evaluate", "register"}
    assert changed(keys_of(file), keys_of(file, "shuffle.seed=2")) == {"shuffle", "train", "evaluate", "register"}
    assert changed(keys_of(file), keys_of(file, "materialize.unit_bytes=1")) == {"materialize", "shuffle"}
    assert changed(keys_of(file), keys_of(file, "evaluate.metrics=[f1]")) == {"evaluate"}


def test_free_fields_are_not_in_the_train_key(tmp_path: Path) -> None:
    """But those that decide what is trained: the same lengths do not train more."""
    free = {path for path, rule in resume_rules(TrainSpec) if rule is OnResume.FREE}
    inputs = keys_of(make(tmp_path))["train"].inputs
    assert {path for path in free if f"train.{path}" in inputs} == {"epochs", "max_steps", "validate_every_steps"}


def test_label_made_by_a_transform_has_keys(tmp_path: Path) -> None:
    file = make(tmp_path)
    loaded = load_spec(file, ["data.label=made"])
    assert loaded.project.source.label is None
    loaded = load_spec(file, ["preprocess=[]"])
    assert loaded.project.source.label == "y"


def test_read_key_has_format_library_version(tmp_path: Path) -> None:
    file = make(tmp_path)
    (tmp_path / "rows" / "a.avro").write_bytes(b"listed, not read")
    assert not [name for name in keys_of(file)["read"].inputs if "fastavro" in name]
    assert "version.fastavro" in keys_of(file, "data.format=avro")["read"].inputs
    plain, cropped = keys_of(file, "data.images={size: [4, 4]}"), keys_of(file, "data.images={size: [4, 4], fit: crop}")
    assert changed(plain, keys_of(file, "data.images={size: [4, 4], fit: resize}")) == set()
    assert "preprocess" in changed(plain, cropped)
    assert changed(keys_of(file), keys_of(file, "data.missing_columns=error")) == set()
    assert "read" in changed(keys_of(file), keys_of(file, "data.missing_columns=null"))
