"""How values and errors are written in messages."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.messages import counted, describe_error, did_you_mean, in_yaml, shorten


@pytest.mark.parametrize(
    "error, said",
    [(KeyError("x"), "KeyError: 'x'"), (SystemExit(), "SystemExit"), (SystemExit(2), "SystemExit: 2"), (OSError(), "OSError")],
)
def test_describe_error_without_text_gives_class(error: BaseException, said: str) -> None:
    assert describe_error(error) == said


def test_counts_and_long_values() -> None:
    assert [counted(number, "file") for number in (0, 1, 1200)] == ["0 files", "1 file", "1,200 files"]
    assert counted(2, "file is", "files are") == "2 files are"
    assert shorten("x" * 100, 10) == "'xxxxxx..."


@given(st.text(st.characters(codec="ascii") | st.sampled_from("äß²語𝄞")))
@example("größe (m²)")
@example("a: b, c")
@example("true")
@example("1.5")
def test_in_yaml_name_reads_back(name: str) -> None:
    assert yaml.safe_load(f"{{types: {{{in_yaml(name)}: int64}}}}") == {"types": {name: "int64"}}
    assert yaml.safe_load(f"drop: [{in_yaml(name)}]") == {"drop": [name]}


def test_in_yaml_plain_name_has_no_quotes() -> None:
    assert [in_yaml(name) for name in ("x", "mean radius", "größe (m²)", "a: b")] == [
        "x",
        "mean radius",
        "größe (m²)",
        '"a: b"',
    ]


@pytest.mark.parametrize(
    ("name", "most", "hint"),
    [("AGE", 1, "; did you mean 'Age'?"), ("towm", 2, "; did you mean 'town' or 'town2'?"), ("zzz", 1, "")],
)
def test_did_you_mean_closest_names(name: str, most: int, hint: str) -> None:
    assert did_you_mean(name, ["town", "town2", "Age"], most) == hint
