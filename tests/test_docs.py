"""The documentation says what the code does."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_spec_reference_is_the_one_the_code_gives() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_spec_reference.py"))["reference"]()
    assert (ROOT / "docs" / "spec.md").read_text(encoding="utf-8") == made, "run: python docs/make_spec_reference.py"
