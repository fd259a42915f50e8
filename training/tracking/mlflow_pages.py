"""How do MLflow's pages show what a run is made of? Its datasets, its checkpoints, and the columns of the list of runs."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag

from penstock.ingest.schema import FeedSchema

__all__ = ["CHECKPOINTS_FILE", "checkpoint_table", "dataset_input", "list_view", "short_digest"]


CHECKPOINTS_FILE = "checkpoints.csv"
"""Artifact that lists the checkpoints of a run that are there."""

_DIGEST_LETTERS = 12
"""The list of runs shows a dataset's digest, and has room for a few letters; the whole digest is a tag of the run."""

_METRIC_COLUMNS = 6

_ATTRIBUTES = ("Dataset",)
"""Further ones would push the metrics out of a narrow window."""


def short_digest(digest: str) -> str:
    """What stands for a dataset's digest in MLflow."""
    return digest[:_DIGEST_LETTERS]


def dataset_input(
    name: str, digest: str, uri: str, schema: Mapping[str, Any], context: str, profile: Mapping[str, Any]
) -> DatasetInput:
    """The rows of a split as an input of a run.

    Args:
        schema: a `FeedSchema` as JSON.
        context: the split.
        profile: what is said of the rows; `num_rows` is shown by MLflow beside the schema.
    """
    dataset = Dataset(
        name[:500],
        short_digest(digest),
        "s3" if uri.startswith("s3://") else "local",
        json.dumps({"uri": uri}),
        schema=_column_schema(FeedSchema.model_validate(schema)),
        profile=json.dumps(profile),
    )
    return DatasetInput(dataset, [InputTag("mlflow.data.context", context)])


def _column_schema(schema: FeedSchema) -> str:
    """The columns as MLflow's JSON for tables: of one for arrays its page shows nothing."""
    columns = [{"name": column.name, "type": column.type_text, "required": True} for column in schema.columns]
    return json.dumps({"mlflow_colspec": columns})


def checkpoint_table(checkpoints: Iterable[Mapping[str, Any]]) -> str:
    """Checkpoints as CSV, by step: `name`, `step`, `epoch`, `uri`, and the metrics measured on each."""
    found = sorted(checkpoints, key=lambda entry: int(entry["step"]))
    metrics = sorted({name for entry in found for name in entry["metrics"]}, key=_place)
    into = io.StringIO()
    writer = csv.writer(into, lineterminator="\n")
    writer.writerow(["name", "step", "epoch", *metrics, "uri"])
    for entry in found:
        measured = [entry["metrics"].get(name, "") for name in metrics]
        writer.writerow([entry["name"], entry["step"], entry["epoch"], *measured, entry["uri"]])
    return into.getvalue()


def list_view(metrics: Iterable[str]) -> str | None:
    """The state of the list of runs that shows held-out metrics beside each run: what its tag holds. None without any."""
    held_out = [name for name in sorted(metrics, key=_place) if name.startswith(("test/", "val/"))]
    if not held_out:
        return None
    columns = [f"metrics.`{name}`" for name in held_out[:_METRIC_COLUMNS]]
    return json.dumps({"selectedColumns": [*columns, *(f"attributes.`{name}`" for name in _ATTRIBUTES)]})


def _place(name: str) -> tuple[int, bool, str]:
    """What a person compares first: the test split, then validation; within one the loss comes last."""
    splits = ("test/", "val/", "train/")
    return next((i for i, split in enumerate(splits) if name.startswith(split)), len(splits)), name.endswith("/loss"), name
