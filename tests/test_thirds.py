"""Do the thirds that CI runs by turns hold every file of tests, and take as long as each other?"""

from __future__ import annotations

import time

import pytest

import tests.conftest
from tests import ROOT
from tests.conftest import _SECONDS, files_of_third


def test_three_thirds_hold_each_file_once() -> None:
    files = {f"tests/test_{number}.py" for number in range(7)}
    thirds = [files_of_third(files, third) for third in range(3)]
    assert sorted(name for third in thirds for name in third) == sorted(files)
    assert max(map(len, thirds)) - min(map(len, thirds)) <= 1


def test_thirds_of_long_files_take_equally_long() -> None:
    assert [file for file in _SECONDS if not (ROOT / file).is_file()] == []
    totals_s = [sum(_SECONDS[file] for file in files_of_third({*_SECONDS}, third)) for third in range(3)]
    assert sum(totals_s) == sum(_SECONDS.values())
    assert max(totals_s) - min(totals_s) <= 0.05 * max(totals_s)


def test_only_a_begun_file_goes_on_after_its_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request.config.option, "begin_until", time.time() - 1)
    tests.conftest.pytest_runtest_setup(request.node)
    monkeypatch.setattr(tests.conftest, "_begun", set())
    with pytest.raises(pytest.skip.Exception, match="no time left"):
        tests.conftest.pytest_runtest_setup(request.node)
    monkeypatch.setattr(request.config.option, "begin_until", time.time() + 60)
    tests.conftest.pytest_runtest_setup(request.node)
