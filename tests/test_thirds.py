"""Do the thirds that CI runs by turns hold every file of tests?"""

from __future__ import annotations

from tests.conftest import files_of_third


def test_three_thirds_hold_each_file_once() -> None:
    files = {f"tests/test_{number}.py" for number in range(7)}
    thirds = [files_of_third(files, third) for third in range(3)]
    assert sorted(name for third in thirds for name in third) == sorted(files)
    assert max(map(len, thirds)) - min(map(len, thirds)) <= 1
