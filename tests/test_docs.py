"""The documentation says what the code does."""

from __future__ import annotations

import runpy
from typing import Any

import numpy as np

from tests import ROOT


def test_the_spec_reference_is_the_one_the_code_gives() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_spec_reference.py"))["reference"]()
    assert (ROOT / "docs" / "spec.md").read_text(encoding="utf-8") == made, "run: python docs/make_spec_reference.py"


def test_the_example_of_a_transform_does_what_it_says() -> None:
    section = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8").split("## Functions for `map_batches`")[1]
    names: dict[str, Any] = {}
    exec(section.split("```python\n")[1].split("```")[0], names)
    out = names["normalize"]({"age": np.array([50, 0])})
    assert out["age"].tolist() == [0.5, 0]
    assert out["_keep"].tolist() == [True, False]
