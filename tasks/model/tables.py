"""Which rows was the model most wrong about? Tables that a person reads, as CSV."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from penstock.ingest.schema import FeedSchema
from penstock.tasks.records.data_tables import as_csv

__all__ = ["MOST_WRONG_ROWS", "most_wrong"]

MOST_WRONG_ROWS = 100


def most_wrong(answers: pa.Table, schema: FeedSchema) -> str:
    """The rows of the highest loss first, by file and row; classes by name.

    Args:
        answers: columns of training/evaluation/row_results.py, with `file` and `row`.
    """
    order = pc.sort_indices(answers, [("loss", "descending")]).slice(0, MOST_WRONG_ROWS)
    worst = answers.take(order)
    shown = {name: worst.column(name) for name in ("file", "row", "target", "predicted", "loss")}
    shown["file"] = shown["file"].cast(pa.string())
    if schema.classes is not None:
        names = pa.array(schema.classes)
        for name in ("target", "predicted"):
            shown[name] = names.take(shown[name].combine_chunks().cast(pa.int64()))
    return as_csv(pa.table(shown))
