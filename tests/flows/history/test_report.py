"""The page of a run shows the rows left out, the speed, and the bytes that nodes fetched."""

from __future__ import annotations

from penstock.flows.history.render import line_chart
from penstock.flows.history.report import report_page
from penstock.ingest.manifest import DatasetManifest, ShardTable
from penstock.ingest.schema import FeedSchema
from penstock.storage import Storage
from penstock.tasks.records.keys import StageKey
from penstock.tasks.records.ledger import Ledger, NodeFetches, Run, StageRecord
from penstock.training.checkpoint.journal import Writer, seal_points
from penstock.training.events import Point


def test_page_has_left_out_rows_speed_and_fetched_bytes() -> None:
    ledger = Ledger(Storage("memory://report"))
    keys = {"materialize": StageKey(stage="materialize", key="rows", inputs={})}
    run = Run(run="r", pipeline="p", created="2026-01-01T00:00:00+00:00", spec={}, keys=keys)
    ledger.save_run(run)
    attempt = ledger.new_attempt("r")
    fetched = {"node1": NodeFetches(bytes=3_000_000, wait_s=1.25), "node2": NodeFetches(bytes=1_000_000)}
    ledger.save_attempt("r", attempt.model_copy(update={"fetched": fetched}))
    extra = {"dropped": {"null": 1200, "broken image": 34}}
    table = ShardTable(size_bytes={"train": 1_500_000, "validation": 500_000, "test": 1_000_000})
    manifest = DatasetManifest(
        key="rows", feed_schema=FeedSchema(columns=()), rows={"train": 90}, table=table, content_digest="c", extra=extra
    )
    output = manifest.model_dump(mode="json")
    record = StageRecord(stage="materialize", key="rows", inputs={}, output=output, seconds=0, made="")
    ledger.save_stage("stages/materialize/rows.json", record)
    values = {"train/rows_per_s": 640.0, "train/step_s": 1.0, "train/data_wait_s": 0.5}
    seal_points(ledger.run_storage("r"), Writer(1), 10, [Point(step, step, values) for step in range(1, 11)])
    page = report_page(ledger, run)
    assert "<td>left out</td>" in page and "1,234 (broken image: 34, null: 1,200)" in page
    assert "It trained 640 rows a second in the median. It was data-bound 50% of the time: the workers" in page
    assert (
        "fetched from the store 4.0 MB, 2 times the rows to train and validate on: node1 3.0 MB (waited 1.2 s), "
        "node2 1.0 MB (waited 0.0 s)"
    ) in page


def test_chart_draws_each_curve_and_a_single_point() -> None:
    chart = str(line_chart({"train/loss": [(1, 4.0), (3, 2.0), (4, float("nan"))], "val/<loss>": [(3, 3.0)]}))
    assert 'points="24.0,24.0 496.0,196.0"' in chart and 'points="496.0,110.0 496.0,110.0"' in chart
    assert "2.0000 to 4.0000" in chart and "<title>val/&lt;loss&gt;</title>" in chart
    assert line_chart({"train/loss": [(1, float("nan"))]}) == ""
