"""Are the figures of an evaluation readable PNGs of the right things?"""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.training.evaluation.evaluate import Answers, answers_of
from penstock.training.exporters.figures import draw_figures, export, figure_png


def picture(png: bytes) -> tuple[int, int]:
    image = Image.open(io.BytesIO(png))
    image.verify()
    return image.size


def judged(schema: FeedSchema, output: torch.Tensor, target: torch.Tensor) -> Answers:
    return answers_of(np.arange(len(target)), {str(schema.label): target}, output, schema, "logits")


def of_classes(classes: int) -> FeedSchema:
    names = tuple(f"class number {index}" for index in range(classes))
    return FeedSchema(columns=(ColumnInfo(name="y", dtype="int64"),), label="y", classes=names, num_classes=classes)


@pytest.mark.parametrize("classes", [2, 10, 30])
def test_confusion_matrix_shows_the_share_of_each_true_class(classes: int) -> None:
    schema, target = of_classes(classes), torch.arange(classes).repeat_interleave(4)
    chosen = target.clone()
    chosen[0] = classes - 1
    answers = judged(schema, 9 * torch.nn.functional.one_hot(chosen, classes).float(), target)
    drawn = draw_figures(schema, answers, "test")
    assert all(500 < side < 2600 for side in picture(figure_png(drawn["confusion_matrix"])))
    axes = drawn["confusion_matrix"].axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(schema.classes or ())
    shown = [text.get_text() for text in axes.texts]
    assert len(shown) == classes**2 and (shown[0], shown[classes - 1], shown[-1]) == ("75%", "25%", "100%")


def test_curves_are_those_of_scikit_learn() -> None:
    generator = torch.Generator().manual_seed(2)
    target = torch.randint(0, 2, (400,), generator=generator)
    logits = torch.stack([torch.zeros(400), target + 2 * torch.randn(400, generator=generator)], dim=1)
    drawn = draw_figures(of_classes(2), judged(of_classes(2), logits, target), "test")
    assert set(drawn) == {"confusion_matrix", "calibration", "roc", "precision_recall"}
    assert drawn["calibration"].axes[0].get_xlabel() == "confidence of the predicted class"  # scikit-learn writes of one class
    positive = torch.softmax(logits, 1)[:, 1]
    legends = {name: drawn[name].axes[0].get_legend().get_texts()[0].get_text() for name in ("roc", "precision_recall")}
    assert legends["roc"] == f"model (AUC = {roc_auc_score(target, positive):.2f})"
    assert legends["precision_recall"] == f"model (AP = {average_precision_score(target, positive):.2f})"
    rates, (precision, recall, _) = roc_curve(target, positive), precision_recall_curve(target, positive)
    points = [drawn[name].axes[0].get_lines()[0].get_xydata() for name in ("roc", "precision_recall")]
    assert points[0] == pytest.approx(np.stack(rates[:2], axis=1)) and points[1] == pytest.approx(
        np.stack([recall, precision], 1)
    )


def test_names_with_dollars_are_drawn_as_written() -> None:
    schema = of_classes(2).model_copy(update={"classes": ("$_$", "$x^2^3$")})
    target = torch.tensor([0, 1, 1])
    answers = judged(schema, 9 * torch.nn.functional.one_hot(target, 2).float(), target)
    drawn, _ = export(schema, {"test": answers}, {"$_$": 1.0})
    assert all(picture(drawn[name]) for name in ("test-confusion_matrix.png", "feature_importance.png"))


def test_regression_gets_its_own_figures() -> None:
    schema = FeedSchema(columns=(ColumnInfo(name="price", dtype="float32"),), label="price")
    true = torch.rand(40)
    answers = judged(schema, true + 0.1 * torch.randn(40), true)
    figures = draw_figures(schema, answers, "test")
    assert set(figures) == {"predicted_true", "errors"} and all(picture(figure_png(figure)) for figure in figures.values())


def test_answers_that_are_not_numbers_are_not_drawn() -> None:
    price = FeedSchema(columns=(ColumnInfo(name="price", dtype="float32"),), label="price")
    assert draw_figures(price, {}, "test") == {}
    answers = judged(price, torch.tensor([float("nan"), 1.0, float("inf"), 2.0]), torch.rand(4))
    assert set(draw_figures(price, answers, "test")) == {"predicted_true", "errors"}
    astray = torch.cat([torch.randn(5, 2), torch.tensor([[float("nan"), 0.0], [float("inf"), 0.0]])])
    answers = judged(of_classes(2), astray, torch.tensor([0] * 5 + [1] * 2))
    assert set(draw_figures(of_classes(2), answers, "test")) == {"calibration", "confusion_matrix"}
