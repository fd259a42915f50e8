"""Does a registered model say of raw held-out rows, to the bit, what it says of the prepared ones, and what evaluate saw?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import penstock
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.files.listing import list_source
from penstock.ingest.formats.registry import format_of
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.preprocess.chain import split_rows
from penstock.ingest.read.snapshot import read_source
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.progress import silent
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger
from penstock.training.model import ModelSpec, load_model
from penstock.training.registry.loaded_model import answer_table

__all__ = ["check_raw_rows"]


def to_device(columns: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The model is on the GPU where there is one."""
    return {name: column.to(device) for name, column in columns.items()}


def check_raw_rows(file: Path, result: dict[str, Any]) -> None:
    """Compare the answers of the model that `penstock run FILE` has registered, with and without the label's column."""
    project, spec = file.parent, penstock.load_spec(file).spec
    torch.set_num_threads(max(1, int(spec.train.cpus_per_worker)))  # as the stage does: how a sum is cut decides its last bits
    model = penstock.load_model(result["model_uri"], f"sqlite:///{project}/.penstock/mlflow/mlflow.db")
    test = held_out(file)
    answer = model.predict(test)
    (manifest_file,) = project.glob(".penstock/datasets/*/manifest.json")
    manifest = DatasetManifest.model_validate_json(manifest_file.read_text()).opened(Storage(str(project / ".penstock")))
    rows = manifest.rows["test"]
    assert len(answer) == rows == test.num_rows
    order = make_order(ShuffleSpec(mode="none"), rows)
    feed = open_cached_feed(
        [(Storage(str(project / ".penstock")), manifest)],
        "test",
        batch_rows=spec.train.batch_rows,
        order=order,
        rank=0,
        world_size=1,
    )
    (folder,) = project.glob(".penstock/mlflow/**/model.json")
    trained = load_model(ModelSpec.model_validate_json(folder.read_text()), Storage(str(folder.parent)))
    with torch.no_grad():
        batches = [(to_device(batch.columns, trained.device), batch.rows) for batch in feed.batches(0) if batch.rows]
        output = torch.cat([trained.predict(*batch) for batch in batches]).cpu()
    made = answer_table(output, manifest.feed_schema, trained.predicts)
    for name in made.column_names:
        assert np.array_equal(np.array(answer[name].tolist()), np.array(made[name].to_pylist())), name
    recorded = Ledger(Storage(str(project / ".penstock"))).answers(result["run"], "test")
    label = spec.data.label
    assert (recorded is None) == (label is None)
    if recorded is not None:
        # What the stage itself saw, the class and -log of the true one's probability. By length its batches are others, and
        # some processors then round otherwise in the last bits (an Intel Xeon did for a row that is alone in its batch here).
        probabilities = np.array(made["probabilities"].to_pylist(), np.float32)
        assert np.array_equal(recorded["predicted"].to_numpy(), probabilities.argmax(axis=1).astype(np.float32))
        target = recorded["target"].to_numpy().astype(np.int64)
        of_truth = probabilities[np.arange(rows), target]
        loss = -np.log(np.maximum(of_truth, 1e-12))
        most = 0 if spec.shuffle.by_length is None else 1e-6
        assert np.abs(recorded["loss"].to_numpy() - loss).max() <= most
    if label is not None:
        right = np.array(answer["prediction"].tolist()) == np.array(test.column(label).to_pylist())
        assert np.float32(right.mean()) == np.float32(result["metrics"]["test/accuracy"])
        assert model.predict(test.drop_columns([label])).equals(answer), "a file without the label is scored"


def held_out(file: Path) -> pa.Table:
    """The rows of the test split as the source has them."""
    data = penstock.load_spec(file).spec.data
    snapshot = read_source(data, list_source(data, file.parent, format_of(data).extensions).files, silent)
    found = split_rows(data, snapshot, snapshot.files, 4096)
    return pa.concat_tables([table for split, table, _ in found if split == "test"])
