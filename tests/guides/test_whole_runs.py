"""Three of the guides' programs as a user runs them: by a script, by `penstock run` with two kills, and as a sweep."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.guides.test_cifar import pixels_and_labels
from tests.runs.forked import Command
from tests.runs.killed import calm_and_killed

pytestmark = [pytest.mark.slow, pytest.mark.drill]

HERE = Path(__file__).parent
SCRIPT = """
import json

import penstock
import torch

{functions}

rows = [{{"x": x, "y": x / 200}} for x in range(200)]
seen = []
spec = {{"name": "quickstart", "train": {{"workers": 2}}}}
result = penstock.run(spec, train_func=quickstart, data={{"train": rows, "validation": rows[:20]}}, on_report=seen.append)
with result.checkpoint.as_directory() as folder:
    weights = torch.load(f"{{folder}}/model.pt", weights_only=True)["model"]
print(json.dumps([result["status"], sorted(weights), sorted((each["rank"], each["step"]) for each in seen)]))
"""


def test_quickstart_of_a_script_gives_reports_and_weights(tmp_path: Path) -> None:
    source = (HERE / "ingest_programs.py").read_text().partition("\ndef keep(")[0].partition('"""\n')[2]
    (tmp_path / "script.py").write_text(SCRIPT.format(functions=source))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    status, weights, seen = json.loads(done.stdout.splitlines()[-1])
    assert (status, weights) == ("done", ["0.bias", "0.weight"])
    assert seen == [[0, 1], [0, 2], [1, 1], [1, 2]], "a batch of each worker in two epochs"


def pictures(folder: Path) -> Path:
    """The project of the guide's third step."""
    spec = {
        "name": "pictures",
        "data": {"format": "parquet", "train": "train", "validation": "validation", "label": "label"},
        "preprocess": [{"map_batches": "cifar_programs.py:to_unit_range"}],
        "train": {
            "loop": "cifar_programs.py:with_ray_data",
            "params": {"lr": 0.001, "epochs": 12, "batch_size_per_worker": 16, "restores": True},
            "workers": 2,
            "datasets": {"valid": "whole"},
            "checkpoint": {"best": {"metric": "accuracy", "mode": "max"}},
        },
    }
    images, labels = pixels_and_labels(600)
    for split, rows in (("train", slice(0, 512)), ("validation", slice(512, 600))):
        (folder / split).mkdir(parents=True)
        table = pa.table({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(images[rows]), "label": labels[rows]})
        pq.write_table(table, folder / split / "part-0.parquet")
    shutil.copy(HERE / "cifar_programs.py", folder)
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(spec))
    return folder / "pipeline.yaml"


@pytest.mark.usefixtures("shared_prefect")
def test_third_step_on_two_workers_ends_as_undisturbed_after_two_kills(tmp_path: Path) -> None:
    calm, ended = calm_and_killed(tmp_path, pictures, [])
    assert (calm["status"], ended["status"], ended["attempt"]) == ("done", "done", 2)
    assert ended["weights_digest"] == calm["weights_digest"] and ended["metrics"] == calm["metrics"]
    assert ended["metrics"]["val/accuracy"] > 0.2 and ended["model_uri"].startswith("models:/pictures/")


@pytest.mark.usefixtures("shared_prefect")
def test_sweep_finds_the_input_with_the_greatest_output(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"x": np.arange(20)}), tmp_path / "train" / "part-0.parquet")
    shutil.copy(HERE / "user_guide_programs.py", tmp_path)
    loop = {"loop": "user_guide_programs.py:output_is_input", "params": {"num_epochs": 2, "input": 0}}
    sweep = {"space": {"train.params.input": {"choice": [1, 2, 3]}}, "searcher": "grid", "metric": "output", "mode": "max"}
    spec = {"name": "sweep", "data": {"format": "parquet", "train": "train"}, "train": loop, "tune": sweep}
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(spec))
    swept = Command("tune", str(tmp_path / "pipeline.yaml"), "--json").finish()
    assert [(trial["state"], trial["value"]) for trial in swept["trials"]] == [("done", 1.0), ("done", 2.0), ("done", 3.0)]
    best = yaml.safe_load((tmp_path / "pipeline.best.yaml").read_text())["train"]["params"]
    assert best == {"num_epochs": 2, "input": 3}
