"""When may training begin with the first unit, and in which order are the others prepared? In that of their first use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.flows.spec_file import load_spec
from penstock.ingest.manifest import DatasetManifest, ShardInfo, ShardTable
from penstock.ingest.schema import FeedSchema
from penstock.ingest.spec import ShuffleSpec
from penstock.tasks import overlap
from penstock.tasks.shuffle import train_order
from tests.flows.test_spec_file import GOOD, problems_of, write

EARLY = ["materialize.overlap=true", "data.validation=held.csv", "shuffle.mode=windowed"]
CLASSES = "preprocess=[label_encoder]"

ROWS = [30, 7, 55, 1, 90, 41, 12, 64]


@pytest.mark.parametrize("mode", ["none", "windowed", "global"])
def test_units_come_in_the_order_of_their_first_row(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_IDS_AT_ONCE", 17)
    table = ShardTable.of([ShardInfo.pending(f"u{number}", "train", 0, rows, rows) for number, rows in enumerate(ROWS)])
    rows = {"train": sum(ROWS)}
    manifest = DatasetManifest(key="k", feed_schema=FeedSchema(columns=()), rows=rows, table=table, content_digest="c")
    spec = ShuffleSpec(mode=mode, lanes=1, window_rows=60, window_of="shards" if mode == "windowed" else "rows")  # type: ignore[arg-type]
    order = train_order(spec, manifest, 10)
    shard_of = np.repeat(np.arange(len(ROWS)), ROWS)[order.ids(0, 0, sum(ROWS))].tolist()
    assert overlap.units_by_use(order, manifest) == [f"u{number}" for number in dict.fromkeys(shard_of)]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("materialize.cache=memory", "materialize.cache: only shards on disk are read while others are made; use disk"),
        ("data.invalid=drop", "data.invalid: rows that are left out are not counted beforehand; use error"),
        ("data.test={fraction: 0.1}", "data.test: how many rows a rule takes is not known beforehand; give it its own files"),
        (
            "preprocess=[{filter: t.py:f}]",
            "preprocess.0.filter: how many rows it makes is not known beforehand; filter the source",
        ),
        ("shuffle.mode=global", "shuffle.mode: the first steps have rows of all shards; use windowed, or none"),
        ("train.framework=lightning", "train.framework: only a recipe in torch reads rows as they are prepared"),
    ],
)
def test_overlap_of_rows_that_nobody_counted_is_refused(tmp_path: Path, override: str, says: str) -> None:
    file = write(tmp_path, GOOD)
    assert load_spec(file, EARLY).spec.overlaps
    (problem,) = problems_of(file, *EARLY, override)
    assert problem.endswith(f"{says} (materialize.overlap: true)")
    # `auto` does without it, silently.
    assert load_spec(file, [*EARLY, CLASSES, "materialize.overlap=auto"]).spec.overlaps
    assert not load_spec(file, [*EARLY, CLASSES, "materialize.overlap=auto", override]).spec.overlaps


def test_overlap_auto_needs_known_classes_and_no_function(tmp_path: Path) -> None:
    file, auto = write(tmp_path, GOOD), [*EARLY, "materialize.overlap=auto"]
    assert not load_spec(file, auto).spec.overlaps
    assert load_spec(file, [*auto, "data.label=null"]).spec.overlaps
    assert not load_spec(file, [*auto, "preprocess=[label_encoder, {map_batches: t.py:f}]"]).spec.overlaps
    assert not load_spec(file, [*auto, "preprocess=[{label_encoder: {column: other}}]"]).spec.overlaps
    assert not load_spec(file, [CLASSES]).spec.overlaps
