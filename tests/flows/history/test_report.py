"""The page of a run shows the rows left out, where they are listed, and the speed."""

from __future__ import annotations

from penstock.flows.history.report import report_page
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
from penstock.tasks.records.keys import StageKey
from penstock.tasks.records.ledger import Ledger, Run, StageRecord
from penstock.training.checkpoint.journal import JournalWriter, Writer
from penstock.training.events import Point


def test_page_has_left_out_rows_and_speed() -> None:
    ledger = Ledger(Storage("memory://report"))
    keys = {"materialize": StageKey(stage="materialize", key="rows", inputs={})}
    run = Run(run="r", pipeline="p", created="2026-01-01T00:00:00+00:00", spec={}, keys=keys)
    ledger.save_run(run)
    ledger.new_attempt("r")
    extra = {"dropped": {"null": 1200, "broken image": 34}, "quarantined": 1234}
    manifest = DatasetManifest(
        key="rows", feed_schema=FeedSchema(columns=()), rows={"train": 90}, content_digest="c", extra=extra
    )
    output = manifest.model_dump(mode="json")
    record = StageRecord(stage="materialize", key="rows", inputs={}, output=output, seconds=0, made="")
    ledger.save_stage("stages/materialize/rows.json", record)
    journal = JournalWriter(ledger.run_storage("r"), Writer(1, 0))
    for step in range(1, 11):
        values = {"train/rows_per_s": 640.0, "train/step_s": 1.0, "train/data_wait_s": 0.5}
        journal.add(Point(step, step, values))
    journal.seal(10)
    page = report_page(ledger, run)
    assert "<td>left out</td>" in page and "1,234 (broken image: 34, null: 1,200); listed in datasets/rows/" in page
    assert "It trained 640 rows a second in the median. It was data-bound 50% of the time: the workers" in page
