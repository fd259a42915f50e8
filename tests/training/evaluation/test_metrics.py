"""Are metrics chosen by name and label, and right whether a recipe returns logits or probabilities?"""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    matthews_corrcoef,
    mean_absolute_error,
    mean_squared_error,
    precision_score,
    r2_score,
    recall_score,
    roc_auc_score,
    root_mean_squared_error,
)
from torch import Tensor, nn

from penstock.errors import SpecError, TrainingError
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.shuffle.row_generator import RowGenerator
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.training.determinism import in_deterministic_mode
from penstock.training.evaluation.metrics import CLASSIFICATION, MANY_CLASSES, REGRESSION, make_metrics, prepare_predictions
from penstock.training.frameworks.ray_train.loading import LoopModel
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from tests.training.digits import write_digits
from tests.training.ranks import run_ranks


def schema(classes: int | None = None, label: str | None = "y") -> FeedSchema:
    return FeedSchema(columns=(ColumnInfo(name="y", dtype="int64"),), label=label, num_classes=classes)


class Predicts:
    def predict(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return batch["y"]


class Probabilities(Predicts):
    predicts = "probabilities"


class OwnMetrics(Predicts):
    def metrics(self) -> dict[str, Any]:
        return {"top2": torchmetrics.Accuracy("multiclass", num_classes=4, top_k=2)}


class WithoutLabel(Predicts):
    def metrics(self) -> dict[str, Any]:
        return {"mean": torchmetrics.MeanMetric()}


def recipe(user: object | None = None) -> Recipe:
    return Recipe(user or Predicts(), "model.py:Mine")


def measure(
    names: list[str] | None, classes: int | None, batches: list[tuple[Tensor, Tensor]], user: object | None = None
) -> dict[str, float]:
    metrics = make_metrics(names, schema(classes), recipe(user))
    for output, target in batches:
        metrics.update(output, {"y": target})
    return metrics.compute()


def test_two_classes_agree_with_scikit_learn_from_one_logit_or_two() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(200, generator=generator)
    target = (torch.rand(200, generator=generator) < torch.sigmoid(logits)).long()
    names = ["accuracy", "f1", "auroc", "average_precision"]
    expected = {
        "accuracy": accuracy_score(target, logits > 0),
        "f1": f1_score(target, logits > 0),
        "auroc": roc_auc_score(target, logits),
        "average_precision": average_precision_score(target, logits),
    }
    halves = [(logits[:90], target[:90]), (logits[90:], target[90:])]
    assert measure(names, 2, halves) == pytest.approx(expected, abs=1e-6)
    both = [(torch.stack([torch.zeros(len(part)), part], dim=1), rows) for part, rows in halves]
    assert measure(names, 2, both) == pytest.approx(expected, abs=1e-6)


def warned_of_values(warned: pytest.WarningsRecorder) -> list[str]:
    """What the metric libraries warn of; a file of another test that is closed by chance, or an old import, is none of it."""
    return [str(each.message) for each in warned if issubclass(each.category, UserWarning | RuntimeWarning)]


@pytest.mark.parametrize("classes", [3, 40])
def test_class_without_rows_does_not_count_in_the_mean(classes: int, recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(600, classes), torch.randint(0, classes - 1, (600,))
    probabilities = torch.softmax(logits, 1)
    found = measure(
        ["balanced_accuracy", "auroc", "average_precision"],
        classes,
        [(logits[:500], target[:500]), (logits[500:], target[500:])],
    )
    assert not warned_of_values(recwarn)
    present = range(classes - 1)
    predicted = logits.argmax(1)
    assert found["balanced_accuracy"] == pytest.approx(
        sum(float((predicted[target == c] == c).float().mean()) for c in present) / len(present), abs=1e-6
    )
    coarse = 5e-3 if classes > MANY_CLASSES else 1e-6
    for name, by_sklearn in (("auroc", roc_auc_score), ("average_precision", average_precision_score)):
        expected = sum(by_sklearn(target == c, probabilities[:, c]) for c in present) / len(present)
        assert found[name] == pytest.approx(expected, abs=coarse)


def undefined_of(classes: int | None, target: list[float], names: list[str] | None = None) -> dict[str, str]:
    """Return why metrics are undefined for these labels; check that their values are NaN and the others' are not."""
    names = names or [*(REGRESSION if classes is None else CLASSIFICATION)]
    metrics = make_metrics(names, schema(classes), recipe())
    scores = torch.randn(len(target), *([] if classes is None else [classes]))
    for row in range(len(target)):
        labels = torch.tensor(target[row : row + 1])
        metrics.update(scores[row : row + 1], {"y": labels if classes is None else labels.long()})
    values = metrics.compute()
    assert {name for name, value in values.items() if value != value} == metrics.undefined.keys()
    return metrics.undefined


def test_undefined_metric_is_nan_with_a_reason(recwarn: pytest.WarningsRecorder) -> None:
    ones, zeros = [1.0] * 5, [0.0] * 5
    of_one_class = dict.fromkeys(("auroc", "mcc"), "all rows are of one class")
    of_class_1 = dict.fromkeys(("f1", "precision", "recall", "average_precision"), "no row is of the class")
    assert undefined_of(2, ones) == of_one_class == undefined_of(3, [2.0] * 5)
    assert undefined_of(2, zeros) == of_one_class | of_class_1
    for classes in (2, 3, MANY_CLASSES + 5):
        assert undefined_of(classes, [0.0, 1.0]) == {}
    assert undefined_of(None, ones) == {"r2": "all rows have the same label"} and undefined_of(None, [1.0, 2.0]) == {}
    assert undefined_of(None, [3.0]) == {"r2": "all rows have the same label"}
    assert not warned_of_values(recwarn)
    assert undefined_of(2, [], ["auroc"]) == {"auroc": "there are no rows"}


def test_mean_over_labels_counts_the_defined_ones(recwarn: pytest.WarningsRecorder) -> None:
    generator = torch.Generator().manual_seed(3)
    scores, labels = torch.randn(60, 3, generator=generator), torch.randint(0, 2, (60, 3), generator=generator)
    labels[:, 0] = 0
    of_three = FeedSchema(columns=(ColumnInfo(name="y", dtype="uint8", shape=(3,)),), label="y")
    metrics = make_metrics(["f1", "auroc", "average_precision"], of_three, recipe())
    metrics.update(scores, {"y": labels.to(torch.uint8)})
    found = metrics.compute()
    assert not metrics.undefined
    assert found["auroc"] == pytest.approx(roc_auc_score(labels[:, 1:], scores[:, 1:]), abs=1e-6)
    assert found["average_precision"] == pytest.approx(average_precision_score(labels[:, 1:], scores[:, 1:]), abs=1e-6)
    metrics.update(scores, {"y": torch.zeros(60, 3, dtype=torch.uint8)})
    assert all(value != value for value in metrics.compute().values())
    assert metrics.undefined == {
        "f1": "no row is of the class",
        "auroc": "all rows are of one class",
        "average_precision": "no row is of the class",
    }
    assert not warned_of_values(recwarn)


def test_logits_and_probabilities_measure_the_same() -> None:
    logits = 3 * torch.randn(300, 5, generator=torch.Generator().manual_seed(2))
    target = torch.randint(0, 5, (300,), generator=torch.Generator().manual_seed(3))
    names = [name for name in CLASSIFICATION if name != "mcc"]
    from_logits = measure(names, 5, [(logits, target)])
    assert measure(names, 5, [(torch.softmax(logits, 1), target)], Probabilities()) == pytest.approx(from_logits, abs=1e-6)
    coarse = torch.softmax(logits.bfloat16(), 1)
    assert coarse.dtype == torch.bfloat16 and not coarse.float().sum(1).allclose(torch.ones(300), atol=1e-3)
    assert measure(names, 5, [(coarse, target)], Probabilities()) == pytest.approx(from_logits, abs=0.02)
    assert from_logits["f1"] == pytest.approx(f1_score(target, logits.argmax(1), average="macro"), abs=1e-6)


def test_no_share_is_above_one() -> None:
    target = torch.arange(10)
    perfect = [(100 * nn.functional.one_hot(target, 10).float(), target)]
    assert torchmetrics.F1Score("multiclass", num_classes=10, average="macro")(*perfect[0]) > 1, "in float32 its mean is"
    assert measure(["f1", "precision", "recall"], 10, perfect) == {"f1": 1, "precision": 1, "recall": 1}


def test_order_of_large_logits_is_kept() -> None:
    rows = torch.arange(60)
    target = rows % 3
    logits = torch.stack([20 + 2.0 * (target == 0) + rows / 100, torch.zeros(60), torch.zeros(60)], dim=1)
    metrics = make_metrics(["auroc"], schema(3), recipe())
    found = prepare_predictions(logits, schema(3))
    metrics.update(logits, {"y": target})
    assert roc_auc_score(target == 0, found[:, 0]) == 1.0 and metrics.compute()["auroc"] > 0.6


def test_logits_that_sum_to_one_stay_logits() -> None:
    made, scores = schema(3), torch.tensor([[0.2, 0.3, 0.5], [4.0, -1.0, 0.0]])
    assert torch.equal(prepare_predictions(scores[:1], made), prepare_predictions(scores, made)[:1])
    one = torch.tensor([0.25, 0.75])
    assert prepare_predictions(one, schema(2), "probabilities").tolist() == [[0.75, 0.25], [0.25, 0.75]]


def several(labels: int) -> FeedSchema:
    return FeedSchema(columns=(ColumnInfo(name="y", dtype="int64", shape=(labels,)),), label="y")


def test_invalid_probabilities_are_refused() -> None:
    with pytest.raises(TrainingError, match="negative or do not sum to 1"):
        prepare_predictions(torch.tensor([[4.0, -1.0, 0.0]]), schema(3), "probabilities")
    with pytest.raises(TrainingError, match="are not all from 0 to 1"):
        prepare_predictions(torch.tensor([[4.0, 1.0]]), several(2), "probabilities")


def test_rounded_probabilities_stay_probabilities() -> None:
    target, sure = torch.tensor([0, 1, 1, 0, 1]), 1.0000001
    for shares in (
        torch.tensor([[sure, 0.0], [0.0, sure], [0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]),
        torch.tensor([0, sure, 0.9, 0.2, 0.7]),
    ):
        assert shares.max() > 1
        found = measure(["f1", "precision", "calibration_error"], 2, [(shares, target)], Probabilities())
        assert found == pytest.approx({"f1": 1.0, "precision": 1.0, "calibration_error": 0.6 / 5}, abs=1e-5)
    metrics = make_metrics(["accuracy"], several(2), recipe(Probabilities()))
    metrics.update(torch.tensor([[sure, 0.1], [0.2, sure]]), {"y": torch.eye(2, dtype=torch.int64)})
    assert metrics.compute() == {"accuracy": 1.0}


@pytest.mark.parametrize("classes", [2, 3])
def test_metric_of_nan_predictions_is_nan_with_a_reason(classes: int) -> None:
    target = torch.arange(100) % classes
    logits = 9 * nn.functional.one_hot(target, classes).float()
    logits[7] = torch.nan
    metrics = make_metrics([*CLASSIFICATION], schema(classes), recipe())
    metrics.update(logits, {"y": target})
    assert all(np.isnan(value) for value in metrics.compute().values())
    assert metrics.undefined == dict.fromkeys(CLASSIFICATION, "the prediction of 1 row is NaN")
    metrics.update(logits[8:], {"y": target[8:]})
    assert metrics.compute()["f1"] == 1.0, "of the next rows"
    numbers = make_metrics([*REGRESSION], schema(), recipe())
    numbers.update(torch.tensor([1.0, torch.nan]), {"y": torch.tensor([1.0, 2.0])})
    assert all(np.isnan(value) for value in numbers.compute().values())
    assert numbers.undefined == dict.fromkeys(REGRESSION, "the prediction of 1 row is NaN")


@pytest.mark.parametrize(("classes", "guess"), [(2, 0), (2, 1), (3, 1)])
def test_mcc_of_a_constant_answer_is_zero(classes: int, guess: int) -> None:
    target = torch.arange(100) % 10 % classes
    logits = nn.functional.one_hot(torch.full((100,), guess), classes).float()
    assert measure(["mcc"], classes, [(logits, target)]) == {"mcc": 0.0}


def test_large_logits_keep_their_order() -> None:
    target = torch.tensor([0, 0, 1, 1])
    logits = torch.tensor([20.0, 22.0, 30.0, 32.0])
    for given_ in (logits, torch.stack([torch.zeros(4), logits], dim=1)):
        assert measure(["auroc", "average_precision"], 2, [(given_, target)]) == {"auroc": 1.0, "average_precision": 1.0}


def test_float64_predictions_of_numbers_stay_exact() -> None:
    numbers = make_metrics(["mae", "r2"], schema(), recipe())
    labels = torch.tensor([1700000037.0, 1700000101.0], dtype=torch.float64)
    numbers.update(labels, {"y": labels})
    assert numbers.compute() == {"mae": 0.0, "r2": 1.0}


def test_regression_agrees_with_scikit_learn() -> None:
    true = torch.randn(50, generator=torch.Generator().manual_seed(4))
    predicted = true + 0.1
    values = measure(list(REGRESSION), None, [(predicted[:, None], true)])
    assert values["mse"] == pytest.approx(0.01, rel=1e-4) and values["rmse"] == pytest.approx(0.1, rel=1e-4)
    assert values["r2"] == pytest.approx(r2_score(true, predicted), abs=1e-5)
    small, large = (
        measure(["r2"], None, [(predicted * 1e-4, true * 1e-4)]),
        measure(["r2"], None, [(predicted + 1e3, true + 1e3)]),
    )
    assert small["r2"] == pytest.approx(values["r2"], rel=1e-6)
    assert large["r2"] == pytest.approx(r2_score((true + 1e3).double(), (predicted + 1e3).double()), rel=1e-9)


def test_without_names_the_labels_kind_decides() -> None:
    assert set(make_metrics(None, schema(3), recipe()).metrics) == {"accuracy", "f1"}
    assert set(make_metrics(None, schema(), recipe()).metrics) == {"mae", "rmse", "r2"}
    assert set(make_metrics(None, schema(label=None), recipe()).metrics) == set()
    assert set(make_metrics(None, schema(3), recipe(object())).metrics) == set()


def test_a_recipes_own_metrics_see_what_it_predicts() -> None:
    output = torch.tensor([[4.0, 3.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    assert measure(None, 4, [(output, torch.tensor([1, 0]))], OwnMetrics()) == {"top2": 0.5}


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(SpecError) as caught:
        make_metrics(["acuracy", "mse", "f1"], schema(3), recipe())
    unknown, wrong_kind = caught.value.problems
    assert "did you mean 'accuracy'" in unknown
    assert "'mse' is for labels that are numbers; 'y' is 3 classes" in wrong_kind
    assert "loss" in caught.value.next_step and "f1" in caught.value.next_step


@pytest.mark.parametrize(
    "names, made, user, message",
    [
        (["accuracy"], schema(), None, "'y' is a number"),
        (["accuracy"], schema(label=None), None, "set data.label"),
        (["accuracy"], schema(3), object(), "needs a method predict"),
    ],
)
def test_a_metric_that_cannot_be_measured_is_refused(
    names: list[str], made: FeedSchema, user: object | None, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make_metrics(names, made, recipe(user))


def test_model_that_cannot_predict_names_the_code_that_would() -> None:
    with pytest.raises(SpecError, match=r"needs a function load_model\(folder, config\) in the file of train.loop"):
        make_metrics(["accuracy"], schema(3), LoopModel(None, None, "loop.py:f"))


def test_loss_is_always_measured_and_needs_nothing() -> None:
    assert make_metrics(["loss"], schema(label=None), recipe(object())).metrics == {}


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 3, 1)])
def test_predictions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(TrainingError, match=r"needs \[rows, 3\]"):
        prepare_predictions(torch.zeros(shape), schema(3))


def count_many_classes(_: Group) -> tuple[dict[str, float], bool, bool]:
    """Metrics of 2,000 classes, in a process that may take 4 GiB more."""
    rows, classes = 1024, 2000
    target = torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(0))
    right = torch.nn.functional.one_hot(target, classes).float()
    names = ["accuracy", "balanced_accuracy", "f1", "mcc", "calibration_error"]
    metrics = make_metrics(names, schema(classes), Recipe(Predicts(), "m.py:M"))
    metrics.metrics  # noqa: B018  # what it imports does not count
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.use_deterministic_algorithms(True, warn_only=True)
    metrics.update(right, {"y": target})
    return (
        metrics.compute(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def test_many_classes_need_no_table_for_every_row() -> None:
    ((values, *mode),) = run_ranks(count_many_classes, 1)
    assert mode == [True, True]
    assert [values[name] for name in ("accuracy", "balanced_accuracy", "f1", "mcc")] == [1.0] * 4


def test_augment_is_deterministic_while_metrics_are_counted(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    manifest = write_digits(storage)
    order = make_order(ShuffleSpec(), manifest.rows["train"], [shard.rows for shard in manifest.shards_of("train")])
    feed = open_cached_feed([(storage, manifest)], "train", order=order, batch_rows=4)
    modes: list[bool] = []

    def augment(columns: dict[str, Tensor], _: RowGenerator) -> dict[str, Tensor]:
        for _ in range(1000):
            modes.append(torch.are_deterministic_algorithms_enabled())
            columns["image"] = columns["image"] * 1.0
        return columns

    feed.augment_with(in_deterministic_mode(augment), 0)
    metrics, predicted = make_metrics(["f1"], schema(10), recipe()), torch.rand(20_000, 10)
    target = predicted.argmax(1)
    metrics.update(predicted, {"y": target})  # what is loaded first is loaded
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for _ in feed.batches(0):
            metrics.update(predicted, {"y": target})
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(modes) > 10_000 and all(modes)


def areas(group: Group) -> dict[str, float]:
    """Areas under the curves of rows that rank 0 alone has."""
    metrics = make_metrics(["auroc", "average_precision", "accuracy"], schema(3), recipe())
    if group.is_first:
        metrics.update(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), {"y": torch.arange(12) % 3})
    return metrics.compute()


def test_rank_without_rows_computes_metrics_that_keep_rows() -> None:
    assert run_ranks(areas, 2) == [areas(Group(0, 1, torch.device("cpu")))] * 2


def test_integers_beyond_0_and_1_are_not_several_labels() -> None:
    columns = (ColumnInfo(name="x", dtype="float32"), ColumnInfo(name="y", dtype="int64", shape=(2,)))
    found = make_metrics(["accuracy"], FeedSchema(columns=columns, label="y"), Recipe(SimpleNamespace(predict=print), "m.py:M"))
    found.update(torch.zeros(2, 2), {"y": torch.tensor([[0, 1], [1, 1]])})
    with pytest.raises(TrainingError, match=r"label 'y' holds int64\[2\], not all 0 or 1"):
        found.update(torch.zeros(2, 2), {"y": torch.tensor([[0, 5], [1, 3]])})


def test_several_labels_or_targets_agree_with_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(3)
    scores, labels = torch.randn(60, 3, generator=generator), torch.randint(0, 2, (60, 3), generator=generator)
    of_three = FeedSchema(columns=(ColumnInfo(name="y", dtype="uint8", shape=(3,)),), label="y")
    metrics = make_metrics(["accuracy", "f1", "auroc"], of_three, recipe())
    for part in (slice(0, 25), slice(25, None)):
        metrics.update(scores[part], {"y": labels[part].to(torch.uint8)})
    found = metrics.compute()
    assert found["accuracy"] == pytest.approx(accuracy_score(labels.flatten(), (scores > 0).flatten()))
    assert found["f1"] == pytest.approx(f1_score(labels, scores > 0, average="macro"))
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-6)
    with pytest.raises(TrainingError, match=r"label 'y' needs \[rows, 3\]"):
        metrics.update(scores[:, :2], {"y": labels})

    targets = FeedSchema(columns=(ColumnInfo(name="y", dtype="float32", shape=(3,)),), label="y")
    metrics = make_metrics(None, targets, recipe())
    metrics.update(scores, {"y": 2 * scores})
    found = metrics.compute()
    assert found["mae"] == pytest.approx(scores.abs().mean().item()) and found["r2"] == pytest.approx(
        r2_score(2 * scores, scores)
    )


def in_two_parts(names: list[str], of: FeedSchema, output: Tensor, target: Tensor, cut: int) -> dict[str, float]:
    metrics = make_metrics(names, of, recipe())
    for part in (slice(0, cut), slice(cut, None)):
        metrics.update(output[part], {"y": target[part]})
    return metrics.compute()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(2, 60),
    targets=st.sampled_from([1, 3]),
    mean=st.sampled_from([0.0, -1.0, 1998.0, 2.4e6, 1.7e9, 1e-9]),
    spread=st.sampled_from([1e-6, 1.0, 300.0, 1e5]),
)
def test_regression_equals_scikit_learn_in_float64(seed: int, rows: int, targets: int, mean: float, spread: float) -> None:
    rng = np.random.default_rng(seed)
    true = mean + spread * rng.standard_normal((rows, targets)) * [1.0, 7.0, 0.1][:targets]
    predicted = (true + spread * rng.standard_normal((rows, targets))).astype(np.float32)
    assume((np.ptp(true, axis=0) > 1e-7 * abs(mean)).all())
    shape = () if targets == 1 else (targets,)
    of = FeedSchema(columns=(ColumnInfo(name="y", dtype="float64", shape=shape),), label="y")
    found = in_two_parts(
        [*REGRESSION], of, *(torch.from_numpy(each.reshape(rows, *shape)) for each in (predicted, true)), rows // 3
    )
    expected = {
        "mse": mean_squared_error(true, predicted),
        "rmse": root_mean_squared_error(true, predicted),
        "mae": mean_absolute_error(true, predicted),
        "r2": r2_score(true, predicted),
    }
    assert found == pytest.approx(expected, rel=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(12, 60),
    classes=st.sampled_from([2, 3, 5]),
    size=st.sampled_from([0.1, 1.0, 30.0, 1e5]),
)
def test_classification_equals_scikit_learn_in_float64(seed: int, rows: int, classes: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    target = np.concatenate([np.arange(classes), rng.integers(0, classes, rows - classes)])
    # Few values, so that rows tie; in a row no two classes do.
    logits = (size * rng.integers(-2, 3, (rows, classes)) + np.arange(classes) / 8).astype(np.float32)
    of = schema(classes)
    found = in_two_parts([*CLASSIFICATION], of, torch.from_numpy(logits), torch.from_numpy(target), rows // 3)
    shares = prepare_predictions(torch.from_numpy(logits), of).double().numpy()
    assume((np.sort(shares)[:, -1] > np.sort(shares)[:, -2]).all())
    chosen, score = shares.argmax(1), shares[:, 1] if classes == 2 else shares
    average, one_hot = ("binary", target) if classes == 2 else ("macro", np.eye(classes)[target])
    expected = {
        "accuracy": accuracy_score(target, chosen),
        "balanced_accuracy": balanced_accuracy_score(target, chosen),
        "f1": f1_score(target, chosen, average=average, zero_division=0),
        "precision": precision_score(target, chosen, average=average, zero_division=0),
        "recall": recall_score(target, chosen, average=average, zero_division=0),
        "mcc": matthews_corrcoef(target, chosen),
        "auroc": roc_auc_score(one_hot, score),
        "average_precision": average_precision_score(one_hot, score),
    }
    del found["calibration_error"]
    assert found == pytest.approx(expected, abs=1e-5)


def test_without_a_label_metrics_see_the_predictions_alone() -> None:
    metrics = make_metrics(None, schema(label=None), recipe(WithoutLabel()))
    metrics.update(torch.tensor([1.0, 2.0]), {"y": torch.zeros(2)})
    metrics.update(torch.tensor([6.0]), {"y": torch.zeros(1)})
    assert metrics.compute() == {"mean": 3.0}
    compares = make_metrics(None, schema(label=None), recipe(OwnMetrics()))
    with pytest.raises(TrainingError, match=r"'top2' cannot be updated with predictions .*: .*'target'"):
        compares.update(torch.zeros(2, 4), {})


def test_unknown_metric_error_names_key() -> None:
    with pytest.raises(SpecError, match=r"^evaluate\.metrics cannot be measured") as caught:
        make_metrics(["acuracy"], schema(classes=3), recipe())
    assert caught.value.next_step is not None and "loss" in caught.value.next_step
    with pytest.raises(SpecError, match=r"^register\.promote\.metric cannot be measured") as caught:
        make_metrics(["acuracy"], schema(classes=3), recipe(), "register.promote.metric")
    assert caught.value.next_step is not None and "accuracy" in caught.value.next_step and "loss" not in caught.value.next_step
