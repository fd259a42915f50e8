"""Are the locations of a request checked before a server starts?"""

from __future__ import annotations

import pytest

from penstock.errors import SpecError
from penstock.flows.predict.verb import predict_request


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
