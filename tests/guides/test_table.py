"""Does each test that the table names exist?"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_table_names_tests_that_exist_and_every_test_here() -> None:
    table = (HERE / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"([\w./]+\.py)(?:::(\w+))?", table.partition("|---|")[2])
    named = [(path, name) for path, name in named if (HERE / path).parent.exists()]  # a plug-in's may be deleted
    assert named and not [path for path, _ in named if not (HERE / path).exists()]
    assert not [name for path, name in named if name and f"def {name}(" not in (HERE / path).read_text(encoding="utf-8")]
    there = {name for file in HERE.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)}
    assert there - {name for _, name in named} == {test_table_names_tests_that_exist_and_every_test_here.__name__}
