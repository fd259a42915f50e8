"""Is a framework that is not installed one clear line, with the command that installs it, before anything else is tried?"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import ROOT

WITHOUT = """
import importlib.abc, importlib.metadata, json, sys
ABSENT = {"xgboost", "lightgbm", "lightning", "pytorch_lightning", "transformers", "accelerate", "keras", "tensorflow"}

class Nowhere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nowhere())
there = importlib.metadata.distribution

def distribution(name):
    if name.lower().replace("-", "_").removesuffix("_cpu") in ABSENT:
        raise importlib.metadata.PackageNotFoundError(name)
    return there(name)

importlib.metadata.distribution = distribution
from penstock.flows.cli import main

for line in sys.argv[1:]:
    sys.argv = ["penstock", *json.loads(line)]
    try:
        main()
    except SystemExit as ended:
        print("ended", ended.code)
"""
"""Runs commands, each a JSON list of words, in a process where no package of ABSENT is installed."""

FRAMEWORKS = ("xgboost", "lightgbm", "lightning", "transformers", "keras")

PIPELINE = """
name: numbers
data: {format: csv, train: rows.csv, label: label}
train: {recipe: model.py:build, epochs: 2}
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Return problem and next command of `penstock check` for each framework."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pipeline.yaml").write_text(PIPELINE)
    (folder / "rows.csv").write_text("a,label\n" + "".join(f"{n},{n % 2}\n" for n in range(40)))
    (folder / "model.py").write_text("import keras\n\n\ndef build(): ...\n")
    calls = [json.dumps(["check", str(folder / "pipeline.yaml"), "--set", f"train.framework={name}"]) for name in FRAMEWORKS]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *calls],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    told = [line for line in done.stderr.splitlines() if line.startswith(("penstock: ", "Next: "))]
    assert done.stdout.splitlines().count("ended 3") == len(FRAMEWORKS), done.stdout + done.stderr
    return list(zip(told[::2], told[1::2], strict=True))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_missing_framework_package_is_one_line(answers: list[tuple[str, str]], framework: str) -> None:
    line, command = answers[FRAMEWORKS.index(framework)]
    assert framework in line and "not installed" in line
    assert command == f'Next: pip install "penstock[{framework}]"'
