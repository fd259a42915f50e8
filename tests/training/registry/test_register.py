"""Is a trained model registered once, and does it answer from the registry without penstock being there?"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import load_file, save_file

from penstock.errors import ServiceError, SpecError
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.transform_spec import FittedPreprocess, FittedTransform, TransformSpec
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.ingest.spec import DataSpec
from penstock.training.checkpoint.state_files import weights_digest
from penstock.training.frameworks.torch.framework import TorchFramework
from penstock.training.model import ModelSpec
from penstock.training.registry import register
from penstock.training.registry.load import fetched_model, load_model
from penstock.training.registry.mlflow_registry import MLFLOW
from penstock.training.registry.raw_rows import raw_form
from penstock.training.registry.registry import WEIGHTS_TAG, Registered, TrainedVersion
from penstock.training.tracking.mlflow_backend import connect
from penstock.training.tracking.mlflow_tracker import MlflowTracker
from penstock.training.tracking.mlflow_versions import version_exists
from penstock.training.tracking.tracker import RunStatus
from penstock.usercode.capture import capture

RECIPE = """
import torch
from layers.blocks import head

class Classifier:
    def __init__(self, hidden=4):
        self.hidden = hidden
    def build_model(self, schema):
        features = sum(max(1, torch.Size(c.shape).numel()) for c in schema.features)
        return head(features, self.hidden, schema.num_classes or 1)
    def _inputs(self, batch):
        return torch.cat([batch["image"].float().flatten(1), batch["age"].float()[:, None]], dim=1)
    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(self._inputs(batch)), batch["label"])
    def predict(self, model, batch):
        return model(self._inputs(batch))
"""
BLOCKS = """
from torch import nn

def head(features, hidden, classes):
    return nn.Sequential(nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, classes))
"""
COLUMNS = (
    ColumnInfo(name="image", dtype="uint8", shape=(3, 3)),
    ColumnInfo(name="age", dtype="float32"),
    ColumnInfo(name="label", dtype="int64"),
)
SOURCE = pa.schema(
    [("id", pa.int64()), ("image", pa.list_(pa.list_(pa.uint8(), 3), 3)), ("age", pa.float32()), ("kind", pa.string())]
)
CLASSES = FeedSchema(columns=COLUMNS, label="label", num_classes=3, classes=("ant", "bee", "cat"))
NUMBERS = FeedSchema(columns=(*COLUMNS[:2], ColumnInfo(name="label", dtype="float32")), label="label")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('registry')}/mlflow/mlflow.db"


@pytest.fixture
def arguments(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the register stage passes, for a small recipe of two files with a model of its own name per test."""
    project = tmp_path / "project"
    (project / "layers").mkdir(parents=True)
    (project / "model.py").write_text(RECIPE)
    (project / "layers" / "blocks.py").write_text(BLOCKS)
    code = capture("model.py:Classifier", project)
    schema = getattr(request, "param", CLASSES)
    torch.manual_seed(1)
    model = code.load()(hidden=5).build_model(schema)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    rng = np.random.default_rng(0)
    images, ages = rng.integers(0, 255, (4, 3, 3), dtype=np.uint8).tolist(), rng.random(4).tolist()
    kinds = ["bee"] * 4 if schema is CLASSES else [0.5] * 4
    source = SOURCE if schema is CLASSES else SOURCE.set(3, pa.field("kind", pa.float32()))
    example = pa.table({"id": [1, 2, 3, 4], "image": images, "age": ages, "kind": kinds}, schema=source)
    written: list[Any] = [{"rename": {"kind": "label"}}, {"drop": ["id"]}]
    steps = [FittedTransform(step=TransformSpec.model_validate(step)) for step in written]
    if schema is CLASSES:
        learnt = ColumnState(column="label", categories=CLASSES.classes)
        steps.append(FittedTransform(step=TransformSpec.model_validate("label_encoder"), columns=(learnt,)))
    form = raw_form(DataSpec(format="parquet", train="t", label="label"), FittedPreprocess(steps=tuple(steps)), {}, example)
    return {
        "name": f"model-{tmp_path.name}",
        "alias": "candidate",
        "key": "k" * 32,
        "model": ModelSpec(
            code=code, params={"hidden": 5}, feed_schema=schema, loader=TorchFramework.loader, raw=form.model_dump(mode="json")
        ),
        "files": [tmp_path / "model.safetensors"],
        "example": example.drop_columns(["kind"]),
        "tags": {"penstock.data.digest": "d" * 32, "penstock.data.uri": "s3://bucket/datasets/1"},
        "experiment": "demo",
        "run_name": "run",
        "description": ["test/accuracy 0.5000", "Model: model.py:Net"],
    }


def run_register(uri: str, arguments: dict[str, Any], run_id: str | None = None) -> Registered:
    tracker = MlflowTracker.open(uri, "demo", "run", run_id=run_id)
    try:
        tracker.log_metrics({"test/accuracy": 0.5}, 7)
        tracker.drain()
        return MLFLOW.register(uri, TrainedVersion(**arguments), tracker)
    finally:
        tracker.close("FINISHED")


ELSEWHERE = """
import json, sys
import numpy as np, pandas as pd
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model(sys.argv[2])
images = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
ages = np.array([1, 2, 3], dtype=np.float32)
frame = pd.DataFrame({"image": images.tolist(), "age": ages})
answer = model.predict(frame)
bad = frame.assign(age=["1", "old", 3])
told = model.predict(bad, params={"on_error": "report"})
try:
    model.predict(frame.drop(columns="age"), params={"on_error": "report"})
except mlflow.exceptions.MlflowException as error:
    refused = error.message
from fastapi.testclient import TestClient
from mlflow.pyfunc import scoring_server
body = {"dataframe_records": json.loads(frame.to_json(orient="records", double_precision=15))}
client = TestClient(scoring_server.init(model))
served = client.post("/invocations", json=body).json()["predictions"]
wrong = {"dataframe_records": [{"image": image, "age": age} for image, age in zip(images.tolist(), [1.5, None, 3.5])]}
by_row = client.post("/invocations", json={**wrong, "params": {"on_error": "report"}}).json()["predictions"]
raised = client.post("/invocations", json=wrong).json()["message"]
import penstock.training
loads = callable(penstock.load_model)
# An editable install finds what the copy lacks; an installed package does not.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
try:
    penstock.run
except ImportError as error:
    runs = str(error)
print(json.dumps({"answer": answer.to_dict("list"), "refused": refused, "told": list(told.error),
                  "by_row": [row["error"] for row in by_row], "raised": raised,
                  "served": [row["prediction"] for row in served],
                  "inputs": [(i.name, i.required) for i in model.metadata.get_input_schema().inputs],
                  "code": penstock.training.__file__,
                  "loads": loads, "runs": runs, "heavy": sorted({"ray", "prefect"} & set(sys.modules))}))
"""


def load_elsewhere(uri: str, model: str, folder: Path) -> dict[str, Any]:
    """Load and ask the model in a process that cannot see this checkout."""
    command = [sys.executable, "-c", ELSEWHERE, uri, model]
    done = subprocess.run(
        command, cwd=folder, env={"PATH": "", "HOME": str(folder)}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def expected(arguments: dict[str, Any]) -> torch.Tensor:
    model = arguments["model"].code.load()(hidden=5).build_model(arguments["model"].feed_schema)
    model.load_state_dict(load_file(arguments["files"][0]))
    images = torch.arange(27, dtype=torch.uint8).reshape(3, 9).float()
    with torch.inference_mode():
        return model.eval()(torch.cat([images, torch.tensor([[1.0], [2.0], [3.0]])], dim=1))


def test_classifier_answers_without_penstock_installed(uri: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    registered = run_register(uri, arguments)
    assert registered.version == "1" and registered.uri == f"models:/{arguments['name']}/1"
    found = load_elsewhere(uri, f"models:/{arguments['name']}@candidate", tmp_path)
    assert found["heavy"] == []
    assert found["told"] == [None, "row 1: column 'age' holds 'old', which does not read as float", None]
    assert found["by_row"][0] is None and "row 1: column 'age'" in found["by_row"][1] and found["by_row"][1] in found["raised"]
    assert "Model is missing inputs ['age']" in found["refused"]
    assert found["inputs"] == [["id", False], ["image", True], ["age", True]]
    assert Path(found["code"]).parents[2].name == "penstock.zip"
    assert found["loads"] and found["runs"].startswith("penstock.run: ")
    assert found["runs"].endswith("Next: import penstock before mlflow.pyfunc.load_model")
    assert found["served"] == found["answer"]["prediction"]
    probabilities = torch.softmax(expected(arguments), dim=1)
    assert torch.allclose(torch.tensor(found["answer"]["probabilities"]).float(), probabilities)
    assert found["answer"]["prediction"] == [("ant", "bee", "cat")[index] for index in probabilities.argmax(dim=1)]


@pytest.mark.parametrize("arguments", [NUMBERS], indirect=True)
def test_regression_answers_with_recipe_prediction(uri: str, arguments: dict[str, Any]) -> None:
    location = MlflowClient(uri).get_logged_model(run_register(uri, arguments).model_id).artifact_location
    images, ages = np.arange(27, dtype=np.uint8).reshape(3, 3, 3), np.array([1, 2, 3], dtype=np.float32)
    frame = pd.DataFrame({"image": images.tolist(), "age": ages})
    model = mlflow.pyfunc.load_model(location)
    answer = model.predict(frame)
    assert torch.allclose(torch.tensor(answer["prediction"].to_numpy()), expected(arguments)[:, 0])
    reported = model.predict(frame.assign(age=["1", "old", 3]), params={"on_error": "report"})
    assert reported["prediction"].isna().tolist() == [False, True, False] and reported["prediction"][1] is None, (
        "NaN is not JSON"
    )


def test_example_of_decimals_is_text_and_of_durations_absent(uri: str, arguments: dict[str, Any]) -> None:
    amounts = pa.array([Decimal("1.50")] * 4, pa.decimal128(9, 2))
    decimals = arguments["example"].set_column(0, "id", amounts)
    registered = run_register(uri, {**arguments, "example": decimals})
    location = MlflowClient(uri).get_logged_model(registered.model_id).artifact_location
    assert mlflow.pyfunc.load_model(location).input_example["id"].tolist() == ["1.50"] * 4
    assert len(register._plain(pa.table({"d": pa.array([1], pa.duration("s"))}))) == 0
    assert len(register._plain(pa.table({"d": pa.array([[1]], pa.list_(pa.decimal128(9, 2)))}))) == 0


def test_version_names_data_code_run_without_pickle(uri: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    registered = run_register(uri, arguments)
    client = MlflowClient(uri)
    version = client.get_model_version_by_alias(arguments["name"], "candidate")
    assert version.run_id == registered.run_id and version.tags == {}, "a person does not read digests first"
    assert client.get_logged_model(registered.model_id).tags["penstock.data.digest"] == "d" * 32
    first, *_, last = version.description.split("\n\n")
    assert first == "test/accuracy 0.5000" and f"/runs/{registered.run_id}?workflowType" in last
    model = client.get_logged_model(registered.model_id)
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": registered.name, "version": "1"}]
    assert [o.model_id for o in client.get_run(registered.run_id).outputs.model_outputs] == [registered.model_id]
    root = Path(client.get_logged_model(registered.model_id).artifact_location.removeprefix("file://"))
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    assert "artifacts/model.safetensors" in files and "input_example.json" in files
    assert not [name for name in files if name.endswith((".pkl", ".pickle", ".pt", ".pyc"))]
    assert (root / "artifacts/model.safetensors").read_bytes() == arguments["files"][0].read_bytes()
    spec = json.loads((root / "artifacts/model.json").read_text())
    assert set(spec["code"]["files"]) >= {"model.py", "layers/blocks.py"} and str(tmp_path) not in json.dumps(spec)
    packed = zipfile.ZipFile(root / "code/penstock.zip").namelist()
    assert "penstock/training/registry/loaded_model.py" in packed and all(name.endswith(".py") for name in packed)
    assert not [name for name in packed if any(room in name for room in ("/flows/", "/tasks/"))]
    assert len(files) == 10, f"weights, and what loading needs: {files}"
    assert "penstock-model-" not in (root / "MLmodel").read_text(), "no folder that was temporary"
    requirements = (root / "requirements.txt").read_text().split()
    assert f"torch=={torch.__version__.split('+')[0]}" in requirements


def test_register_same_key_gives_same_version(uri: str, arguments: dict[str, Any]) -> None:
    name, file = arguments["name"], arguments["files"][0]
    digest = weights_digest(load_file(file))
    tagged = {**arguments, "tags": {WEIGHTS_TAG: digest}}
    first = run_register(uri, tagged)
    assert run_register(uri, tagged, first.run_id) == first
    other = run_register(uri, {**tagged, "key": "m" * 32, "alias": "champion"}, first.run_id)
    assert other.version == "2" and other.model_id != first.model_id
    assert MLFLOW.aliases(uri, name) == {"candidate": "1", "champion": "2"}
    found = [MLFLOW.weights(uri, f"models:/{name}{model}") for model in ("@candidate", "/1", "@champion")]
    assert [each.name for each in found] == [f"models:/{name}/{number}" for number in (1, 1, 2)]
    assert {each.digest for each in found} == {digest} and {each.read() for each in found} == {file.read_bytes()}


def test_start_from_unfit_version_is_refused(uri: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    name = arguments["name"]
    client, experiment = connect(uri, "demo")
    client.create_registered_model(name)
    model = client.create_logged_model(experiment, name)
    client.log_model_artifacts(model.model_id, str(tmp_path / "project"))
    client.create_model_version(name, model.artifact_location)
    for given, said in (
        ("@none", "alias none not found"),
        ("", "not the address of a registered"),
        ("/1", "1 has no model.saf"),
    ):
        with pytest.raises(SpecError, match=rf"train\.start_from: .*{said}"):
            MLFLOW.weights(uri, f"models:/{name}{given}")
    with pytest.raises(ServiceError, match="there is no MLflow store"):
        MLFLOW.weights(f"sqlite:///{tmp_path}/none.db", f"models:/{name}/1")


def test_start_from_model_of_another_framework_names_both(uri: str, arguments: dict[str, Any]) -> None:
    run_register(uri, arguments)
    names = "1 was trained with train.framework: torch, and this pipeline has train.framework: xgboost"
    with pytest.raises(SpecError, match=names) as refused:
        MLFLOW.weights(uri, f"models:/{arguments['name']}/1", file="model.ubj", framework="xgboost")
    assert refused.value.next_step.endswith("or set train.framework: torch")


class Killed(BaseException):
    """Stands for the process's end."""


@pytest.mark.parametrize(
    "moment", ["log_model_artifacts", "finalize_logged_model", "create_model_version", "set_registered_model_alias"]
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_register_killed_anywhere_gives_one_version(
    uri: str, arguments: dict[str, Any], moment: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(MlflowClient, moment)

    def dying(*args: Any, **kwargs: Any) -> Any:
        if when == "after":
            original(*args, **kwargs)
        raise Killed

    tracker = MlflowTracker.open(uri, "demo", "run")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(MlflowClient, moment, dying)
        MLFLOW.register(uri, TrainedVersion(**arguments), tracker)
    tracker.close("KILLED")
    again = run_register(uri, arguments, tracker.run_id)
    client = MlflowClient(uri)
    assert [str(v.version) for v in client.search_model_versions(f"name = '{arguments['name']}'")] == ["1"] == [again.version]
    assert str(client.get_model_version_by_alias(arguments["name"], "candidate").version) == "1"
    models = client.search_logged_models([tracker.run.experiment_id], filter_string=f"source_run_id = '{tracker.run_id}'")
    assert [str(model.status) for model in models] == ["READY"]
    assert len(client.get_run(tracker.run_id).outputs.model_outputs) == 1


@pytest.mark.parametrize("status", ["FAILED", "FINISHED"])
def test_model_of_a_run_that_ended_before_is_of_its_last_step(uri: str, arguments: dict[str, Any], status: RunStatus) -> None:
    tracker = MlflowTracker.open(uri, "demo", "run")
    tracker.log_metrics({"train/loss": 0.5}, 7)
    tracker.close(status)
    registered = run_register(uri, arguments, tracker.run_id)
    (output,) = MlflowClient(uri).get_run(registered.run_id).outputs.model_outputs
    assert (output.model_id, output.step) == (registered.model_id, 7)


def test_downloaded_model_leaves_no_files(
    uri: str, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = run_register(uri, arguments)
    client = MlflowClient(uri, registry_uri=uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    # A source that is not a file is downloaded, as from a server.
    other = client.create_model_version(registered.name, f"models:/{registered.model_id}", registered.run_id)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with fetched_model(f"models:/{registered.name}/{other.version}", uri) as found:
        assert found.folder.is_relative_to(tmp_path / "temporary")
    model = load_model(f"models:/{registered.name}/{other.version}", uri)
    assert len(model.predict(arguments["example"])) == arguments["example"].num_rows
    assert not [*(tmp_path / "temporary").iterdir()]


def test_registry_notices_deleted_version(uri: str, arguments: dict[str, Any]) -> None:
    registered = run_register(uri, arguments)
    known = (registered.name, registered.version, registered.run_id)
    assert version_exists(uri, *known)
    assert not version_exists(uri, *known[:2], "another run"), "another store may have a version of that number"
    MlflowClient(uri).delete_model_version(registered.name, registered.version)
    assert not version_exists(uri, *known)


def test_moved_store_keeps_its_models(tmp_path: Path, arguments: dict[str, Any]) -> None:
    def uri_in(project: Path) -> str:
        return f"sqlite:///{project}/.penstock/mlflow/mlflow.db"

    before, copied, moved = tmp_path / "before it", tmp_path / "copied", tmp_path / "moved"
    registered = run_register(uri_in(before), arguments)
    shutil.copytree(before, copied)
    before.rename(moved)
    for project in (copied, moved):
        client, experiment_id = connect(uri_in(project), "demo")
        version = client.get_model_version(registered.name, registered.version)
        model = mlflow.pyfunc.load_model(
            f"{project.as_uri()}/.penstock/mlflow/artifacts/models/{registered.model_id}/artifacts"
        )
        assert model.predict(model.input_example)["prediction"].tolist()
        for address in (version.source, client.get_experiment(experiment_id).artifact_location):
            assert str(address).startswith(f"{project.as_uri()}/.penstock/mlflow/artifacts")
        second = run_register(uri_in(project), {**arguments, "key": "m" * 32}, registered.run_id)
        assert second.version == "2"
        assert (project / ".penstock" / "mlflow" / "artifacts" / "models" / second.model_id).is_dir()
    assert not before.exists(), "nothing is written where it was"


def test_store_with_artifacts_elsewhere_is_unchanged(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    client, _ = connect(uri, "demo")
    elsewhere = (tmp_path / "large" / "mlflow" / "artifacts").as_uri()
    client.create_experiment("other", artifact_location=elsewhere)
    (tmp_path / "mlflow" / "artifacts").mkdir(exist_ok=True)
    client, _ = connect(uri, "demo")
    assert client.get_experiment_by_name("other").artifact_location == elsewhere


def test_register_refusal_is_reported(uri: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ServiceError, match="cannot set alias 'v1'"):
        run_register(uri, {**arguments, "alias": "v1"})


def test_large_example_is_cut() -> None:
    assert register.few_rows(pa.table({"image": [bytes(65536)] * 64, "age": [0.0] * 64})).num_rows == 15
    assert register.few_rows(pa.table({"image": [bytes(2 << 20)] * 2})).num_rows == 1
    assert register.few_rows(pa.table({"image": [bytes(17 << 20)]})).num_rows == 0


def test_model_of_heavy_rows_has_no_example(uri: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "_EXAMPLE_BYTES", 0)
    registered = run_register(uri, arguments)
    root = Path(MlflowClient(uri).get_logged_model(registered.model_id).artifact_location.removeprefix("file://"))
    assert (root / "artifacts/model.safetensors").exists() and not (root / "input_example.json").exists()
