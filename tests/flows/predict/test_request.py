"""Are the locations of a request checked before a server starts?"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import SpecError
from penstock.flows.predict.request import predict_request


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
            predict_request("models:/m@a", *places)
        assert refused.value.message == f"{called}: {location!r}: {problem}"


@pytest.mark.parametrize(
    ("called", "given"),
    [
        ("INPUT", {"source": "http://alice:s3cretpass99@host/rows.csv"}),
        ("--output", {"output": "http://alice:s3cretpass99@host/out"}),
        ("--option connection", {"options": ["connection=postgresql://scott:s3cretpass99@db/prod"]}),
    ],
)
def test_secret_is_refused_before_prefect_keeps_it(called: str, given: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"^{called}: this looks like a secret") as refused:
        predict_request("models:/m@a", **{"source": "rows.csv", "output": "out", **given})
    assert "s3cretpass99" not in str(refused.value)
