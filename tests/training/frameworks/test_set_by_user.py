"""Does a setting that a framework does not read mean the same in all of them, whether or not it is the default?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SpecError
from penstock.training.frameworks.registry import FRAMEWORKS
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture

UNREAD = {"learning_rate": 1e-3, "clip_norm": None, "accumulate": 1, "callbacks": []}
"""Fields with their defaults."""

MODEL = """
class OwnOptimizer:
    def build_model(self, schema): ...
    def loss(self, model, batch): ...
    def optimizer(self, model): ...

def loop(config): ...
"""


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS.names))
@pytest.mark.parametrize("written", [1e-3, 0.5])
def test_unread_learning_rate_is_refused_default_or_not(tmp_path: Path, framework: str, written: float) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    what: dict[str, Any] = {"loop": "model.py:loop"} if framework == "ray_train" else {"recipe": "model.py:OwnOptimizer"}
    what |= {} if framework == "ray_train" else {"framework": framework}
    spec = TrainSpec(**what, learning_rate=written)
    code = capture(spec.recipe, tmp_path, spec.params)
    with pytest.raises(SpecError) as refused:
        FRAMEWORKS.get(framework).check(code, spec)
    assert "learning_rate" in f"{refused.value} {refused.value.problems}"


@pytest.mark.parametrize("field", sorted(UNREAD))
def test_default_written_out_is_set_by_user(field: str) -> None:
    spec = TrainSpec(recipe="model.py:Net", **{field: UNREAD[field]})
    assert spec.set_by_user(UNREAD) == [field] and TrainSpec(recipe="model.py:Net").set_by_user(UNREAD) == []
