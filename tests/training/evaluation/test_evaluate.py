"""Are a checkpoint's metrics those scikit-learn computes, and are the figures readable PNGs of the right things?"""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    precision_recall_curve,
    roc_auc_score,
    roc_curve,
)

from penstock.errors import CheckpointError, DataError, SpecError
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.schema import METRICS_OF, ColumnInfo, FeedSchema
from penstock.storage import Storage
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.checkpoint.state_files import weights_of
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.evaluation.evaluate import RowResults, Slice, evaluate
from penstock.training.evaluation.figures import class_table, draw_figures, figure_png
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
    table = result.tables["test-classes"]
    assert table["class"] == [str(digit) for digit in range(10)] and sum(table["rows"]) == job.manifest.rows["test"]


class Numbers(Predicts):
    """Predicts numbers."""


def test_slice_of_one_class_has_no_auroc(trained: tuple[TrainJob, Checkpoint]) -> None:
    job, checkpoint = trained
    _, labels = split_rows(job.manifest, job.data_storage, "test")
    slices = [Slice("digit", "digit=3", labels == 3), Slice("digit", "digit<5", labels < 5)]
    result = evaluate(job, loaded(job, checkpoint), metrics=["accuracy", "auroc"], figures=False, slices={"test": slices})
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


def picture(png: bytes) -> tuple[int, int]:
    image = Image.open(io.BytesIO(png))
    image.verify()
    return image.size


def answers_of(schema: FeedSchema, output: torch.Tensor, target: torch.Tensor) -> dict[str, np.ndarray]:
    rows = RowResults()
    rows.add(np.arange(len(target)), {str(schema.label): target}, output, schema, "logits")
    return rows.columns()


def of_classes(classes: int) -> FeedSchema:
    names = tuple(f"class number {index}" for index in range(classes))
    return FeedSchema(columns=(ColumnInfo(name="y", dtype="int64"),), label="y", classes=names, num_classes=classes)


@pytest.mark.parametrize("classes", [2, 10, 30])
def test_confusion_matrix_shows_the_share_of_each_true_class(classes: int) -> None:
    schema, target = of_classes(classes), torch.arange(classes).repeat_interleave(4)
    chosen = target.clone()
    chosen[0] = classes - 1
    answers = answers_of(schema, 9 * torch.nn.functional.one_hot(chosen, classes).float(), target)
    drawn = draw_figures(schema, answers, "test")
    assert all(500 < side < 2600 for side in picture(figure_png(drawn["confusion_matrix"])))
    axes = drawn["confusion_matrix"].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(schema.classes or ())
    shown = [text.get_text() for text in axes.texts]
    assert len(shown) == classes**2 and (shown[0], shown[classes - 1], shown[-1]) == ("75%", "25%", "100%")
    table = class_table(schema, answers)
    assert (table["rows"][0], table["predicted"][0], table["recall"][0], table["precision"][0]) == (4, 3, 0.75, 1.0)


def test_curves_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(0, 2, (400,), generator=generator)
    logits = torch.stack([torch.zeros(400), target + 2 * torch.randn(400, generator=generator)], dim=1)
    drawn = draw_figures(of_classes(2), answers_of(of_classes(2), logits, target), "test")
    assert set(drawn) == {"confusion_matrix", "calibration", "roc", "precision_recall"}
    positive = torch.softmax(logits, 1)[:, 1]
    legends = {name: drawn[name].axes[0].get_legend().get_texts()[0].get_text() for name in ("roc", "precision_recall")}
    assert legends["roc"] == f"model (AUC = {roc_auc_score(target, positive):.2f})"
    assert legends["precision_recall"] == f"model (AP = {average_precision_score(target, positive):.2f})"
    rates, (precision, recall, _) = roc_curve(target, positive), precision_recall_curve(target, positive)
    points = [drawn[name].axes[0].get_lines()[0].get_xydata() for name in ("roc", "precision_recall")]
    assert points[0] == pytest.approx(np.stack(rates[:2], axis=1)) and points[1] == pytest.approx(
        np.stack([recall, precision], 1)
    )


def test_regression_gets_its_own_figures() -> None:
    schema = FeedSchema(columns=(ColumnInfo(name="price", dtype="float32"),), label="price")
    true = torch.rand(40)
    answers = answers_of(schema, true + 0.1 * torch.randn(40), true)
    figures = draw_figures(schema, answers, "test")
    assert set(figures) == {"predicted_true", "errors"} and all(picture(figure_png(figure)) for figure in figures.values())
    assert class_table(schema, answers) == {}


def test_answers_that_are_not_numbers_are_not_drawn() -> None:
    price = FeedSchema(columns=(ColumnInfo(name="price", dtype="float32"),), label="price")
    assert draw_figures(price, {}, "test") == {}
    answers = answers_of(price, torch.tensor([float("nan"), 1.0, float("inf"), 2.0]), torch.rand(4))
    assert set(draw_figures(price, answers, "test")) == {"predicted_true", "errors"}
    astray = torch.cat([torch.randn(5, 2), torch.tensor([[float("nan"), 0.0], [float("inf"), 0.0]])])
    answers = answers_of(of_classes(2), astray, torch.tensor([0] * 5 + [1] * 2))
    assert set(draw_figures(of_classes(2), answers, "test")) == {"calibration", "confusion_matrix"}
    assert class_table(of_classes(2), answers)["rows"] == [5, 0]
