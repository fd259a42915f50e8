"""Does the page of the probe name all that a probe may answer?"""

from __future__ import annotations

from penstock.flows.verbs.probe.probe import ADVICE
from penstock.flows.verbs.probe.reading import OTHER, RankReading, summarize
from penstock.ingest.phases import PHASES
from tests import ROOT


def test_the_page_of_the_probe_names_every_place_and_every_figure() -> None:
    page = (ROOT / "docs" / "probe.md").read_text(encoding="utf-8")
    rows = page.split("## Where the time goes")[1].split("|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert {row.split("`")[1] for row in rows} == {*PHASES, OTHER} == {*ADVICE}
    figures = page.split("## For programs")[1]
    still = dict.fromkeys(("first_batch_s", "rows", "bytes", "seconds", "p50_s", "p95_s", "longest_s", "epochs", "phases_s"), 0)
    made = summarize([RankReading.model_validate({"rank": 0, "host": "here", **still})], 0)
    assert [name for name in made if f"`{name}`" not in figures] == []
