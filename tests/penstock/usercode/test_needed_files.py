"""A model keeps the files that loading and predicting read, and none that only training does."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from penstock.training.frameworks.torch.framework import TORCH
from penstock.usercode.capture import capture
from penstock.usercode.needed_files import without_data

BASE = """
from pathlib import Path
HERE = Path(__file__).parent

class Base:
    def optimizer(self, model):
        return read("base_optimizer.txt")
    def shared(self):
        return read("shared.txt")

def read(name, default=(HERE / "default.txt").read_text()):
    return (HERE / name).read_text()
"""

RECIPE = """
from base import HERE, Base, read

AT_IMPORT = read("at_import.txt")

def teacher():
    return read("teacher.txt")

class Net:
    def forward(self):
        return read("net.txt")

class Recipe(Base):
    def __init__(self, vocab):
        self.vocab = open(vocab).read()
    def build_model(self, schema):
        return Net()
    def loss(self, model, batch):
        return self._weights() + teacher() + self.shared() + AT_IMPORT + read("loss.txt")
    def _weights(self):
        return read("weights.txt")
    def predict(self, model, batch):
        return model.forward() + self.shared() + read("predict.txt")
    def augment(self, batch, generator):
        return read("augment.txt")
"""

ONLY_TRAINED = {"base_optimizer.txt", "teacher.txt", "weights.txt", "loss.txt", "augment.txt"}
NEEDED = {"shared.txt", "default.txt", "at_import.txt", "net.txt", "predict.txt", "vocab.txt"}


def write(folder: Path, recipe: str = RECIPE) -> Path:
    (folder / "base.py").write_text(textwrap.dedent(BASE))
    (folder / "model.py").write_text(textwrap.dedent(recipe))
    for name in ONLY_TRAINED | NEEDED:
        (folder / name).write_text(f"<{name}>")
    return folder


def kept(folder: Path, recipe: str = RECIPE) -> set[str]:
    code = capture("model.py:Recipe", write(folder, recipe), {"vocab": "vocab.txt"})
    return {path for path in TORCH.code_to_predict(code).files if not path.endswith(".py")}


def test_files_that_only_training_reads_are_left_out_and_the_rest_loads_and_predicts(tmp_path: Path) -> None:
    whole = capture("model.py:Recipe", write(tmp_path), {"vocab": "vocab.txt"})
    assert {path for path in whole.files if not path.endswith(".py")} == ONLY_TRAINED | NEEDED
    code = TORCH.code_to_predict(whole)
    assert {path for path in code.files if not path.endswith(".py")} == NEEDED
    assert (code.digest, code.reached) == (whole.digest, whole.reached)  # they tell what was trained
    for name in ONLY_TRAINED | NEEDED:
        (tmp_path / name).unlink()  # as on another machine
    recipe = code.load()(**code.located({"vocab": "vocab.txt"}))
    assert recipe.vocab == "<vocab.txt>"
    assert recipe.predict(recipe.build_model(None), {}) == "<net.txt><shared.txt><predict.txt>"


@pytest.mark.parametrize(
    ("old", "new", "more"),
    [
        ("model.forward() +", "self.loss(model, batch) +", ONLY_TRAINED - {"augment.txt", "base_optimizer.txt"}),
        ("model.forward() +", "getattr(self, 'augment')(batch, 0) +", {"augment.txt"}),
        ("model.forward() +", "getattr(self, model.name)() +", ONLY_TRAINED),
        ("class Recipe(Base):", "class Recipe(Base, dict):", {"weights.txt"}),
        ("self.vocab = open(vocab).read()", "self.vocab = teacher()", {"teacher.txt"}),
        (
            "    def augment(self, batch, generator):",
            "    def augment(self, batch, generator, file=read('augment.txt')):",
            {"augment.txt"},
        ),
    ],
    ids=["predict-calls-loss", "by-text", "by-run-time-name", "a-base-that-may-call", "constructor", "default"],
)
def test_what_may_be_called_after_all_is_kept(tmp_path: Path, old: str, new: str, more: set[str]) -> None:
    assert old in RECIPE
    assert kept(tmp_path, RECIPE.replace(old, new)) == NEEDED | more


def test_code_that_is_not_called_at_all_keeps_what_params_name(tmp_path: Path) -> None:
    code = without_data(capture("model.py:Recipe", write(tmp_path), {"vocab": "vocab.txt"}))
    assert set(code.files) == {"base.py", "model.py", "vocab.txt"}
