"""The page on Python and the notebook do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import penstock
from tests import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_prefect")]

FORKS = "from tests.runs.forked import fork_workers_from_here\n\nfork_workers_from_here()"
"""Spares a program the imports of the workers of the Rays that it starts."""

OWN_RAY = "import ray\n\nray.init('local', num_cpus=2, include_dashboard=False, log_to_driver=False)"
"""The runs after the first, which starts one for itself, use one Ray, that of the program."""

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_page_names_everything_that_penstock_exports() -> None:
    assert [name for name in penstock.__all__ if f"`{name}`" not in PAGE] == ["__version__"]


def test_program_of_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    first, *others = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "program.py").write_text("\n\n".join([FORKS, first, OWN_RAY, *others]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-5000:]
    run, returned, *read, prediction, again, rows, problem = done.stdout.splitlines()
    assert run.startswith("done ") and float(run.split()[1]) > 0.85
    value, reported = re.fullmatch(r"\[(.*)\] \[.*, (.*)\]", returned).groups()  # type: ignore[union-attr]
    assert value == reported
    assert read == ["ran", "reused"]
    assert len(prediction.split(",")) == 3 and again == f"30 {tmp_path}/.penstock" and 400 < int(rows) <= 600
    assert "did you mean 'epochs'" in problem and problem.endswith("correct the spec that the program gives")


KILLED = """\
import json, os, tempfile, time
import numpy as np
import penstock
import ray.train
import torch
from sklearn.datasets import load_digits
from torch import nn

CLASSES = 10


class Net(nn.Linear):
    def __init__(self):
        super().__init__(64, CLASSES)


def make(rate):
    def train_func(config):
        model, first = Net(), 0
        if checkpoint := ray.train.get_checkpoint():
            with checkpoint.as_directory() as folder:
                state = torch.load(os.path.join(folder, "state.pt"))
            model.load_state_dict(state["model"])
            first = state["epoch"]
        loader = ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=64)
        for epoch in range(first, 4):
            while epoch == 2 and not os.path.exists(os.environ["GO_ON"]):
                time.sleep(0.05)
            for batch in loader:
                model.zero_grad()
                nn.functional.cross_entropy(model(batch["pixels"]), batch["label"]).backward()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= rate * parameter.grad
            with tempfile.TemporaryDirectory() as folder:
                torch.save({"model": model.state_dict(), "epoch": epoch + 1}, os.path.join(folder, "state.pt"))
                ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))

    return train_func


digits = load_digits()
rows = {"pixels": (digits.data / 16).astype(np.float32), "label": digits.target}
spec = {"name": "held", "storage": "storage", "data": {"label": "label"}, "train": {"checkpoint": {"keep": 9}}}
print(json.dumps(penstock.run(spec, train_func=make(0.1), data={"train": rows}, until="train")))
"""


def start(folder: Path, go_on: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GO_ON": str(go_on)}
    return subprocess.Popen([sys.executable, "program.py"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.drill
def test_killed_program_goes_on_from_its_storage_to_the_same_weights(tmp_path: Path) -> None:
    calm = json.loads(start(tmp_path / "calm", ROOT).communicate(timeout=600)[0])
    killed = start(tmp_path / "killed", tmp_path / "go_on")
    ends = time.monotonic() + 600
    while len([*tmp_path.glob("killed/storage/runs/*/checkpoints/*/manifest.json")]) < 2:
        assert killed.poll() is None and time.monotonic() < ends
        time.sleep(0.1)
    killed.kill()
    killed.communicate()
    (tmp_path / "go_on").touch()
    # Where the program is not: on a machine that has its storage alone.
    (code,) = tmp_path.glob("killed/storage/runs/*/code")
    shutil.copytree(code, tmp_path / "elsewhere")
    command = [sys.executable, "-m", "penstock", "run", ".penstock/given/held.yaml", "--until", "train", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GO_ON": str(tmp_path / "go_on")}
    done = subprocess.run(
        [*command, "--set", f"storage={tmp_path}/killed/storage"],
        cwd=tmp_path / "elsewhere",
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ended = json.loads(done.stdout)
    assert (ended["attempt"], ended["stages"][-1]["outcome"]) == (2, "resumed")
    assert ended["weights_digest"] == calm["weights_digest"]
    again = json.loads(start(tmp_path / "killed", tmp_path / "go_on").communicate(timeout=600)[0])
    assert (again["run"], {stage["outcome"] for stage in again["stages"]}) == (ended["run"], {"reused"})


@pytest.mark.drill
def test_notebook_trains_and_registers_with_plain_output(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / "notebook" / "digits.ipynb", 4)
    assert len(notebook.cells) == 8
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", ())]
    ours = [each for cell in notebook.cells[5:] for each in cell.outputs]
    texts = [each.get("text") or each["data"]["text/plain"] for each in ours]
    stages = [line for line in "\n".join(texts).splitlines() if line.startswith(("+ ", "= "))]
    assert [line.split()[1:3] for line in stages] == [
        [stage, outcome]
        for outcome in ("ran", "reused")
        for stage in ("read", "preprocess", "materialize", "shuffle", "train", "evaluate", "register")
    ]
    assert not [text for text in texts if "\r" in text or "\x1b" in text] and "error" not in {
        each.output_type for each in outputs
    }
    assert {each.get("name", "stdout") for each in ours} == {"stdout"}
    assert "prediction" in texts[-1]
    if picture := os.environ.get("PENSTOCK_NOTEBOOK"):
        nbformat.write(notebook, picture)
        shutil.copytree(tmp_path / ".penstock" / "given", f"{picture}.given")
