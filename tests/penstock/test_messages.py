"""How values and errors are written in messages."""

from __future__ import annotations

import pytest

from penstock.messages import counted, said_of, shorten


@pytest.mark.parametrize(
    "error, said",
    [(KeyError("x"), "KeyError: 'x'"), (SystemExit(), "SystemExit"), (SystemExit(2), "SystemExit: 2"), (OSError(), "OSError")],
)
def test_an_error_without_a_text_is_its_kind(error: BaseException, said: str) -> None:
    assert said_of(error) == said


def test_counts_and_long_values() -> None:
    assert [counted(number, "file") for number in (0, 1, 1200)] == ["0 files", "1 file", "1,200 files"]
    assert counted(2, "file is", "files are") == "2 files are"
    assert shorten("x" * 100, 10) == "'xxxxxx..."
