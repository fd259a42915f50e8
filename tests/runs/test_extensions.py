"""Can other packages add each part of a pipeline? Those of docs/extend, in whole runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.shard_file import open_shard
from penstock.storage import Storage
from tests import ROOT
from tests.drills.project import Command, make_project
from tests.plugin_package import install_package
from tests.runs import forked

pytestmark = pytest.mark.slow

PIXELS = """\
import os
import time


class Pixels:
    num_features = 64

    def features(self, batch):
        time.sleep(float(os.environ.get("DRILL_PAUSE_S", "0")))  # else all is learnt before the stop comes
        return batch["image"].numpy()
"""


def code_of(page: str, language: str = "python") -> str:
    """The first block of Python, or of another language, on a page of docs/extend."""
    return (ROOT / "docs" / "extend" / page).read_text(encoding="utf-8").split(f"```{language}\n")[1].split("```")[0]


UNKNOWN_USER = """
import pwd


def getpwuid(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")


pwd.getpwuid = getpwuid
"""
"""As a container's that runs under a number which its passwd does not list."""


def seeing(*sites: Path, **more: str) -> dict[str, str]:
    """The environment of a command that finds what is installed in `sites`."""
    return {"PYTHONPATH": os.pathsep.join([*map(str, sites), os.environ.get("PYTHONPATH", str(ROOT))]), **more}


@pytest.fixture(scope="module")
def means(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the framework of docs/extend/framework.md is installed."""
    entry = 'nearest-mean = "acme_means:NearestMean"'
    return install_package(tmp_path_factory.mktemp("means"), "penstock.frameworks", entry, code_of("framework.md"))


def means_project(folder: Path) -> Path:
    file = make_project(folder, epochs=3, files=2)
    (file.parent / "model.py").write_text(PIXELS)
    file.write_text(file.read_text().replace("recipe: model.py:Net", "framework: nearest-mean\n  recipe: model.py:Pixels"))
    return file


PARTS = """\
name: parts
{data}
preprocess:
  - clip_quantile: {{columns: [height], share: 0.25}}
train: {{framework: nearest-mean, recipe: model.py:Size, epochs: 3, batch_rows: 16, cpus_per_worker: 0.5}}
register: {{name: parts}}
"""

SIZE = """\
import torch


class Size:
    num_features = 2

    def features(self, batch):
        return torch.stack([batch["height"], batch["weight"]], dim=1).float().numpy()
"""

LOAD = """
import json, sys
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pyfunc.load_model("models:/parts@candidate")
answer = model.predict(model.input_example)
print(json.dumps({"predicted": len(answer), "needs": open(model.metadata.flavors and mlflow.artifacts.download_artifacts(
    "models:/parts@candidate/requirements.txt")).read().split(), "heavy": sorted({"ray", "prefect"} & set(sys.modules))}))
"""


def parts_project(folder: Path) -> Path:
    """Two files of 60 rows to train on and one to look at, in which the height shows the class."""
    for part, name in enumerate(("data/part-0", "data/part-1", "held/part-0")):
        file = (folder / name).with_suffix(".fw")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{150 + row:6d}{50 + part + row / 4:8.2f}{row // 30:2d}\n" for row in range(60)))
    (folder / "model.py").write_text(SIZE)
    data = code_of("format.md", "yaml").replace("{fraction: 0.2}", "held/")
    (folder / "pipeline.yaml").write_text(PARTS.format(data=data))
    return folder / "pipeline.yaml"


@pytest.mark.drill
@pytest.mark.usefixtures("shared_prefect")
def test_a_pipeline_of_other_packages_parts_is_checked_run_registered_and_reused(
    tmp_path: Path, means: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fixed, clip = (
        install_package(tmp_path_factory.mktemp(name), f"penstock.{kind}s", entry, code_of(f"{kind}.md"), name=f"acme-{name}")
        for kind, name, entry in (
            ("format", "fixed", 'fixed_width = "acme_fixed:FixedWidthFormat"'),
            ("transform", "clip", 'clip_quantile = "acme_clip:ClipQuantile"'),
        )
    )
    file, environment = parts_project(tmp_path), seeing(means, fixed, clip)
    checked = forked.Command("check", str(file), "--json", environment=environment).finish()
    assert (checked["rows"], checked["files"]) == (180, 3)
    assert {"train/loss", "val/accuracy"} <= {*checked["batch"]["trained"]["reported"]}
    result = forked.Command("run", str(file), "--json", environment=environment).finish()
    assert (result["status"], result["exactness"]) == ("done", "bit-exact")
    assert result["metrics"]["val/accuracy"] > 0.8
    storage = Storage(str(tmp_path / ".penstock"))
    (dataset,) = Path(storage.root).glob("datasets/*/manifest.json")
    manifest = DatasetManifest.model_validate_json(dataset.read_text()).opened(storage)
    shards = [open_shard(storage.local_path(shard.path)) for shard in manifest.shards_of("train")]
    heights = np.tile(np.arange(150.0, 210), 2)
    clipped = np.clip(heights, *np.quantile(heights, [0.25, 0.75]))
    assert np.allclose(np.sort(np.concatenate([shard.column("height") for shard in shards])), np.sort(clipped))
    uri = f"sqlite:///{tmp_path}/.penstock/mlflow/mlflow.db"
    steps = [point.step for point in MlflowClient(uri).get_metric_history(result["mlflow_run_id"], "train/loss")]
    assert steps == [8, 10, 16, 20, 24], "every ten steps, and at the end of each epoch"
    again = forked.Command("run", str(file), "--json", environment=environment).finish()
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    assert (again["weights_digest"], again["model_uri"]) == (result["weights_digest"], result["model_uri"])
    command = [sys.executable, "-c", LOAD, uri]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (means, fixed, clip)))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert loaded["predicted"] > 0 and loaded["heavy"] == []
    assert {"acme-penstock==1.2", "acme-fixed==1.2", "acme-clip==1.2"} <= set(loaded["needs"])


@pytest.mark.usefixtures("shared_prefect")
@pytest.mark.drill
def test_a_user_without_name_and_home_runs_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(UNKNOWN_USER)
    homeless, file = seeing(tmp_path / "site"), make_project(tmp_path / "project", epochs=1, files=1)
    result = Command("run", str(file), "--json", environment=homeless, before=("env", "-u", "HOME")).finish()
    assert result["status"] == "done"


@pytest.mark.usefixtures("shared_prefect")
@pytest.mark.drill
def test_another_frameworks_training_is_stopped_continued_to_the_same_weights_and_refused_with_other_rows(
    tmp_path: Path, means: Path
) -> None:
    calm = forked.Command("run", str(means_project(tmp_path / "calm")), "--json", environment=seeing(means)).finish()
    file = means_project(tmp_path / "stopped")
    slow = seeing(means, DRILL_PAUSE_S="0.1")
    command = forked.Command("run", str(file), "--json", environment=slow)
    command.wait_for("a checkpoint", lambda: any((file.parent / ".penstock").glob("runs/*/checkpoints/*/manifest.json")))
    os.kill(command.process.pid, signal.SIGTERM)
    stopped = command.finish(code=143)
    assert stopped["checkpoint"] is not None
    refused = forked.Command("run", str(file), "--json", "--set", "shuffle.seed=6", environment=slow).finish(code=6)
    assert "shuffle.seed: 5 -> 6" in str(refused["error"]["problems"])
    finished = forked.Command("run", str(file), "--json", environment=seeing(means)).finish()
    assert (finished["mlflow_run_id"], finished["attempt"]) == (stopped["mlflow_run_id"], 2)
    assert finished["weights_digest"] == calm["weights_digest"] and finished["exactness"] == "bit-exact"


def test_a_framework_that_is_not_installed_is_named_with_what_is_meant(tmp_path: Path) -> None:
    file = means_project(tmp_path / "project")
    refused = forked.Command("check", str(file), "--json").finish(code=2)
    (problem,) = refused["error"]["problems"]
    assert problem.startswith("pipeline.yaml:")
    assert (
        "there is no training framework 'nearest-mean'; there are keras, lightning, ray_train, torch, transformers, " in problem
    )
    wrong = forked.Command("check", str(file), "--json", "--set", "train.framework=torhc").finish(code=2)
    assert "did you mean 'torch'?" in str(wrong["error"]["problems"])


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where the tracker and the model registry of docs/extend are installed, each of a package of its own."""
    lines = install_package(
        tmp_path_factory.mktemp("lines"),
        "penstock.trackers",
        'lines = "acme_lines:LinesTracker"',
        code_of("tracker.md"),
        name="acme-lines",
    )
    folder = install_package(
        tmp_path_factory.mktemp("folder"),
        "penstock.registries",
        'folder = "acme_folder:FOLDER"',
        code_of("registry.md"),
        name="acme-folder",
    )
    return lines, folder


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("shared_prefect")
@pytest.mark.drill
def test_a_tracker_and_a_registry_of_other_packages_take_a_stopped_and_a_finished_run(
    tmp_path: Path, services: tuple[Path, Path]
) -> None:
    file = make_project(tmp_path / "project", epochs=3, files=2)
    file.write_text(file.read_text() + "tracking: {tracker: lines, registry: folder}\n")
    state = file.parent / ".penstock"
    command = forked.Command("run", str(file), "--json", environment=seeing(*services, DRILL_HELD_AT="30"))
    command.wait_for("a checkpoint", lambda: any(state.glob("runs/*/checkpoints/*/manifest.json")))
    command.kill()
    run_name = next((state / "lines" / "drill").iterdir()).name
    tracked = state / "lines" / "drill" / run_name
    assert forked.Command("status", str(file), "--json", environment=seeing(*services)).finish()["repaired"] == [run_name]
    assert [line["status"] for line in json_lines(tracked) if line.get("kind") == "status"] == ["RUNNING", "KILLED"]
    result = forked.Command("run", str(file), "--json", environment=seeing(*services)).finish()
    assert result["lines_run_id"] == f"drill/{run_name}" and "mlflow_run_id" not in result
    lines = json_lines(tracked)
    assert [line["status"] for line in lines if line.get("kind") == "status"][-2:] == ["RUNNING", "FINISHED"]
    steps = [line["step"] for line in lines if "train/loss" in line.get("values", ())]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 20
    kinds = {line["kind"] for line in lines if "kind" in line}
    assert kinds == {"tags", "params", "artifact", "dataset", "status"}
    index = json.loads((state / "models" / "drill" / "index.json").read_text())
    assert index["aliases"] == {"candidate": "1"} and result["model_uri"] == str(state / "models" / "drill" / "1")
    assert not (state / "mlflow").exists()

    again = forked.Command("run", str(file), "--json", environment=seeing(*services)).finish()
    assert {stage["outcome"] for stage in again["stages"]} == {"reused"}
    (state / "models" / "drill" / "1" / "model.json").unlink()
    planned = forked.Command("plan", str(file), "--json", environment=seeing(*services)).finish()
    assert [stage["name"] for stage in planned["stages"] if stage["action"] == "run"] == ["register"]
    # MLflow's registry takes the model of a run that MLflow has not tracked.
    words = ("run", str(file), "--json", "--set", "tracking.registry=mlflow")
    moved = forked.Command(*words, environment=seeing(*services)).finish()
    assert [stage["name"] for stage in moved["stages"] if stage["outcome"] == "ran"] == ["register"]
    client = MlflowClient(f"sqlite:///{state}/mlflow/mlflow.db")
    assert moved["model_uri"] == "models:/drill/1"
    assert client.get_run(client.get_model_version("drill", "1").run_id).info.run_name == run_name.removeprefix("drill-")
