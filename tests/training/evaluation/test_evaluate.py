"""Are a checkpoint's metrics those scikit-learn computes?"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

from penstock.errors import CheckpointError, DataError, SpecError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.schema import METRICS_OF
from penstock.storage import Storage
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.state_files import weights_of
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.evaluation.evaluate import Slice, evaluate
from penstock.training.frameworks.torch.framework import TorchFramework
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, Predicts, TrainedModel, load_model
from penstock.training.recipe import load_recipe
from tests.training.digits import make_job, train_alone


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainJob, Checkpoint]:
    """Digits, trained well enough to have a diagonal."""
    folder = tmp_path_factory.mktemp("trained")
    job = make_job(folder, epochs=8, learning_rate=5e-3)
    train_alone(job)
    checkpoint, _ = CheckpointStore(Storage(str(folder / "run"))).newest_valid()
    assert checkpoint is not None
    return job, checkpoint


def loaded(job: TrainJob, checkpoint: Checkpoint) -> TrainedModel:
    schema, loader = job.manifest.feed_schema, TorchFramework.loader
    spec = ModelSpec(code=job.code, params=job.spec.params, feed_schema=schema, loader=loader)
    return load_model(spec, checkpoint.storage)


def split_rows(manifest: DatasetManifest, storage: Storage, split: str) -> tuple[torch.Tensor, np.ndarray]:
    shards = [open_shard(storage.local_path(shard.path)) for shard in manifest.shards if shard.split == split]
    images = np.concatenate([shard.column("image") for shard in shards])
    return torch.from_numpy(images), np.concatenate([shard.column("label") for shard in shards])


def test_metrics_agree_with_scikit_learn(trained: tuple[TrainJob, Checkpoint]) -> None:
    job, checkpoint = trained
    seen: list[float] = []
    result = evaluate(
        job,
        loaded(job, checkpoint),
        splits=["validation", "test"],
        metrics=["accuracy", "f1", "auroc"],
        progress=lambda done, total, unit, note="": seen.append(done),
    )
    recipe = load_recipe(job.code, job.spec.params)
    model = recipe.build_model(job.manifest.feed_schema).eval()
    model.load_state_dict(weights_of(checkpoint.storage))
    for split in ("validation", "test"):
        images, labels = split_rows(job.manifest, job.data_storage, split)
        with torch.no_grad():
            logits = model(images)
        expected = {
            "loss": torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels.copy())).item(),
            "accuracy": accuracy_score(labels, logits.argmax(1)),
            "f1": f1_score(labels, logits.argmax(1), average="macro"),
            "auroc": roc_auc_score(labels, torch.softmax(logits, 1), multi_class="ovr"),
        }
        found = {name.split("/")[1]: value for name, value in result.metrics.items() if name.startswith(METRICS_OF[split])}
        assert found == pytest.approx(expected, abs=1e-5)
    assert result.metrics["test/accuracy"] > 0.7
    assert seen[-1] == job.manifest.rows["validation"] + job.manifest.rows["test"]
    assert set(result.figures) == {
        f"{split}-{n}.png" for split in ("validation", "test") for n in ("confusion_matrix", "calibration")
    }


class Numbers(Predicts):
    """Predicts numbers."""


def test_slice_of_one_class_has_no_auroc(trained: tuple[TrainJob, Checkpoint]) -> None:
    job, checkpoint = trained
    _, labels = split_rows(job.manifest, job.data_storage, "test")
    slices = [Slice("digit", "digit=3", labels == 3), Slice("digit", "digit<5", labels < 5)]
    result = evaluate(job, loaded(job, checkpoint), metrics=["accuracy", "auroc"], slices={"test": slices})
    three, low = result.slices
    assert three["auroc"] is None and three["not_defined"] == "auroc: all rows are of one class"
    assert three["accuracy"] > 0.2 and low["auroc"] > 0.9 and low["not_defined"] is None
    assert three["rows"] == (labels == 3).sum() and result.undefined == {}


def test_unknown_metric_is_refused_before_rows_are_read(trained: tuple[TrainJob, Checkpoint]) -> None:
    job, checkpoint = trained
    with pytest.raises(SpecError, match="cannot be measured"):
        evaluate(replace(job, data_storage=Storage("/nowhere")), loaded(job, checkpoint), metrics=["acuracy"])


def test_split_without_rows_is_refused(trained: tuple[TrainJob, Checkpoint]) -> None:
    job, checkpoint = trained
    manifest = job.manifest.model_copy(update={"rows": {"train": 333}})
    with pytest.raises(DataError, match="split 'test' has no rows"):
        evaluate(replace(job, manifest=manifest), loaded(job, checkpoint))


def test_weights_of_other_model_are_refused(trained: tuple[TrainJob, Checkpoint]) -> None:
    job, checkpoint = trained
    job = replace(job, spec=job.spec.model_copy(update={"params": {"hidden": 8}}))
    with pytest.raises(CheckpointError, match="do not fit"):
        loaded(job, checkpoint)
