"""Are the locations of a request checked before a server starts?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SpecError
from penstock.flows.predict.request import PredictRequest
from penstock.flows.spec_file import option_values


@pytest.mark.parametrize(
    ("location", "problem"),
    [
        ("s3:/bucket/x", "a URL has two slashes; did you mean s3://bucket/x?"),
        ("file:/rows.csv", "a URL has two slashes; did you mean file:///rows.csv?"),
        ("S3://bucket/x", "a store's name is in lower case; did you mean s3://bucket/x?"),
    ],
)
def test_url_written_wrongly_is_refused(location: str, problem: str) -> None:
    for called, places in (("INPUT", (location, "out")), ("--output", ("rows.csv", location))):
        with pytest.raises(SpecError) as refused:
            PredictRequest(model="models:/m@a", input=places[0], output=places[1], state_dir="s")
        assert refused.value.message == f"{called}: {location!r}: {problem}"


@pytest.mark.parametrize(
    ("called", "given"),
    [
        ("INPUT", {"input": "http://alice:s3cretpass99@host/rows.csv"}),
        ("--output", {"output": "http://alice:s3cretpass99@host/out"}),
        ("--option connection", {"options": ["connection=postgresql://scott:s3cretpass99@db/prod"]}),
    ],
)
def test_secret_is_refused_before_prefect_keeps_it(called: str, given: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"^{called}: this looks like a secret") as refused:
        given["options"] = option_values(given.get("options", []))
        PredictRequest(model="models:/m@a", state_dir="s", **{"input": "rows.csv", "output": "out", **given})
    assert "s3cretpass99" not in str(refused.value)


def test_output_is_absolute_and_options_are_nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    for output, whole in (("out", f"{tmp_path}/out"), ("~/out", "/home/ann/out"), ("s3://bucket/out", "s3://bucket/out")):
        asked = PredictRequest(model="models:/m@a", input="db.rows", output=output, state_dir="s")
        assert (asked.input, asked.output) == ("db.rows", whole)
    assert option_values(["version=3", "properties.type=rest"]) == {"version": 3, "properties": {"type": "rest"}}
