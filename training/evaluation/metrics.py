"""Which metrics are there, and how are they updated with predictions and labels?

Names are those of torchmetrics classes. Classification metrics take class probabilities; the model declares whether
predictions are probabilities, since a batch cannot show it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import SpecError, TrainingError
from penstock.ingest.schema import FeedSchema
from penstock.messages import counted, did_you_mean
from penstock.training.determinism import any_algorithm
from penstock.training.evaluation.defined import Needs, defined_classes, metric_library, r2_metric
from penstock.training.model import SUM_TOLERANCE, ClassScores, Predicts, are_probabilities, missing_part
from penstock.training.spec import BestSpec

if TYPE_CHECKING:
    from torchmetrics import Metric

__all__ = [
    "CLASSIFICATION",
    "REGRESSION",
    "MetricSet",
    "label_kind",
    "make_metrics",
    "prepare_predictions",
    "prepare_target",
    "validation_metrics",
]

LabelKind = Literal["classification", "multilabel", "regression", "none"]

MANY_CLASSES = 30
"""With more classes or labels, areas under curves are computed at fixed thresholds instead of from every row's scores."""

FIXED_THRESHOLDS = 200

CLASSIFICATION: dict[str, Callable[[int], Metric]] = {
    "accuracy": lambda n: _new("MulticlassAccuracy", n, average="micro"),
    "balanced_accuracy": lambda n: _new("MulticlassAccuracy", n, average="none"),
    "f1": lambda n: _new("BinaryF1Score") if n == 2 else _new("MulticlassF1Score", n, average="macro"),
    "precision": lambda n: _new("BinaryPrecision") if n == 2 else _new("MulticlassPrecision", n, average="macro"),
    "recall": lambda n: _new("BinaryRecall") if n == 2 else _new("MulticlassRecall", n, average="macro"),
    "auroc": lambda n: _area("AUROC", n),
    "average_precision": lambda n: _area("AveragePrecision", n),
    "mcc": lambda n: _new("MulticlassConfusionMatrix", n),
    "calibration_error": lambda n: _new("MulticlassCalibrationError", n, n_bins=15),
}
"""Name to constructor, given the number of classes. With two classes f1, precision, recall and the areas look at class 1."""

REGRESSION: dict[str, Callable[[int], Metric]] = {
    "mse": lambda n: _new("MeanSquaredError").set_dtype(torch.float64),
    "rmse": lambda n: _new("MeanSquaredError", squared=False, num_outputs=n).set_dtype(torch.float64),
    "mae": lambda n: _new("MeanAbsoluteError").set_dtype(torch.float64),
    "r2": lambda n: r2_metric()(n),
}
"""Name to constructor, given how many numbers a row has."""

MULTILABEL: dict[str, Callable[[int], Metric]] = {
    "accuracy": lambda n: _new("MultilabelAccuracy", n, average="micro"),
    "f1": lambda n: _new("MultilabelF1Score", n),
    "precision": lambda n: _new("MultilabelPrecision", n),
    "recall": lambda n: _new("MultilabelRecall", n),
    "auroc": lambda n: _new("MultilabelAUROC", n, average="none", thresholds=_thresholds(n)),
    "average_precision": lambda n: _new("MultilabelAveragePrecision", n, average="none", thresholds=_thresholds(n)),
}
"""Name to constructor, given how many labels a row may have. All but accuracy are means over the labels."""

_OF_KIND: dict[LabelKind, dict[str, Callable[[int], Metric]]] = {
    "classification": CLASSIFICATION,
    "multilabel": MULTILABEL,
    "regression": REGRESSION,
    "none": {},
}

_NEEDS: dict[str, Needs] = {
    **dict.fromkeys(("balanced_accuracy", "average_precision", "f1", "precision", "recall"), "a row"),
    **dict.fromkeys(("auroc", "mcc"), "both"),
}
"""Metrics that need more than any row."""

_REASONS: dict[Needs, str] = {"a row": "no row is of the class", "both": "all rows are of one class"}

DEFAULTS: dict[LabelKind, tuple[str, ...]] = {
    "classification": ("accuracy", "f1"),
    "multilabel": ("accuracy", "f1"),
    "regression": ("mae", "rmse", "r2"),
    "none": (),
}

_SUMS_FLOATS = frozenset({"calibration_error"})
"""Metrics that add up floats, on a GPU in a nondeterministic order; the others count."""

_OF_CLASS_1 = frozenset({"f1", "precision", "recall", "auroc", "average_precision"})


def _new(kind: str, *arguments: Any, **options: Any) -> Metric:
    library = metric_library()
    made: Metric = (getattr(library.classification, kind, None) or getattr(library, kind))(*arguments, **options)
    return made


def _area(kind: str, classes: int) -> Metric:
    if classes == 2:
        return _new(f"Binary{kind}")
    return _new(f"Multiclass{kind}", classes, average="none", thresholds=_thresholds(classes))


def _thresholds(classes: int) -> int | None:
    return FIXED_THRESHOLDS if classes > MANY_CLASSES else None


def label_kind(schema: FeedSchema) -> LabelKind:
    """Classify the label: a class index, a flag for each of several labels, one or several numbers, or none (also: lists)."""
    if schema.label is None or schema[schema.label].ragged:
        return "none"
    if schema[schema.label].shape and "float" not in schema[schema.label].dtype:
        return "multilabel"
    return "classification" if schema.num_classes is not None else "regression"


@dataclass
class MetricSet:
    """Metrics of one split. `loss` is measured elsewhere and is not in it."""

    makers: Mapping[str, Callable[[], Metric]]
    """Constructors of the metrics, called at the first use: torchmetrics loads slowly."""
    schema: FeedSchema
    raw: bool
    """Whether the metrics are the recipe's own, updated with the output of `predict` instead of probabilities."""
    predicts: ClassScores = "logits"
    """Kind of the scores that `predict` returns for classes."""
    measure: Callable[[dict[str, Metric], Tensor, Mapping[str, Tensor]], None] | None = None
    """The recipe's own way to update its metrics."""
    device: torch.device | None = None
    """Device of the accumulators; None is their default."""
    undefined: dict[str, str] = field(default_factory=dict, init=False)
    """Metrics that the rows left undefined at the last `compute`, and why."""

    @cached_property
    def _counts(self) -> Tensor | None:
        """Counts of rows of each class, or each of several labels, then of all rows, and of those with a NaN as prediction."""
        if self.raw or not self.makers or self.schema.label is None:
            return None
        classes = math.prod(self.schema[self.schema.label].shape or (self.schema.num_classes or 0,))
        return torch.zeros(classes + 2, dtype=torch.int64, device=self.device)

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """Metrics by name, made on first use."""
        return {name: make().to(self.device) for name, make in self.makers.items()}

    def to(self, device: torch.device) -> MetricSet:
        """Copy, with accumulators on `device`; no metric is made yet."""
        return replace(self, device=device)

    def update(self, output: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Update the metrics with one batch's predictions.

        Raises:
            TrainingError: the predictions' shape does not fit the label.
        """
        if not self.makers:
            return
        if self.measure is not None:
            self.measure(self.metrics, output, batch)
            return
        target = None if self.schema.label is None else batch[self.schema.label]
        if self.raw or target is None:
            for name, metric in self.metrics.items():
                _update(name, metric, output, target)
            return
        prediction = prepare_predictions(output, self.schema, self.predicts)
        target = prepare_target(target, self.schema)
        if self._counts is not None:
            rows, classes = len(target), len(self._counts) - 2
            wrong = prediction.isnan().unsqueeze(-1).flatten(1).any(1).sum()
            if self.schema.num_classes is not None:
                found = torch.bincount(target, minlength=classes)
            else:
                found = target.unsqueeze(-1).flatten(1)[:, :classes].sum(0).long()
            self._counts.add_(torch.cat([found, found.new_tensor([rows]), wrong[None]]))
        prediction = prediction.nan_to_num(0.0, math.inf, -math.inf)  # torchmetrics takes a batch with NaN for logits
        for name, metric in self.metrics.items():
            binary = self.schema.num_classes == 2 and name in _OF_CLASS_1
            _update(name, metric, prediction[:, 1] if binary else prediction, target)

    def compute(self) -> dict[str, float]:
        """Compute the values over all rows of all ranks, and reset the accumulators. A collective of torchmetrics.

        A metric that the rows leave undefined, such as `auroc` of rows of one class, is NaN; `undefined` has the reason.
        """
        values: dict[str, float] = {}
        self.undefined = {}
        _fill_empty_states(self.metrics)
        counts = self._counts
        if counts is not None and dist.is_initialized():
            dist.all_reduce(counts)
        for name, metric in self.metrics.items():
            values.update(_scalars(name, metric.compute() if self.raw else self._where_defined(name, metric, counts)))
            metric.reset()
        if counts is not None:
            counts.zero_()
        return values

    def _where_defined(self, name: str, metric: Metric, counts: Tensor | None) -> Tensor:
        """Compute the value, or its mean over the classes that define it; NaN without any."""
        needs = _NEEDS.get(name)
        defined = None
        if counts is not None and (wrong := int(counts[-1])):
            self.undefined[name] = f"the prediction of {counted(wrong, 'row')} is NaN"
            return torch.full((), math.nan)
        if counts is not None and needs is not None:
            defined = defined_classes(counts[:-1], needs)
            if self.schema.num_classes == 2 and name in _OF_CLASS_1:
                defined = defined[1:]
            if not bool(defined.any()):
                self.undefined[name] = _REASONS[needs] if bool(counts[-2]) else "there are no rows"
                return torch.full((), math.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about classes without rows
            value: Tensor = metric.compute()
        if name == "r2" and bool(value.isnan()):
            self.undefined[name] = "all rows have the same label"
        if name == "mcc":
            return _mcc(value.double())
        if value.numel() > 1:
            value = (value if defined is None else value[defined]).mean()
        # in float32 a mean over classes may come to 1.0000001
        return value.clamp(max=1.0) if name in CLASSIFICATION else value


def make_metrics(
    names: Iterable[str] | None, schema: FeedSchema, model: Predicts, asked_by: str = "evaluate.metrics"
) -> MetricSet:
    """Choose the metrics to measure.

    Args:
        names: as in `evaluate.metrics`; None takes the recipe's own `metrics()`, else those that fit the label.
        asked_by: key of the pipeline file that names them, for the error.
        schema: of the dataset.
        model: must predict for metrics other than the loss.

    Raises:
        SpecError: a name is unknown, does not fit the label, or the recipe cannot predict; all problems at once.
    """
    kind = label_kind(schema)
    if names is None:
        own = model.metrics()
        if own is not None:
            _check_own(own, model)
            measure = model.measure if getattr(model, "can_measure", False) else None  # other packages' models may have none
            return MetricSet({name: partial(own.__getitem__, name) for name in own}, schema, raw=True, measure=measure)
        names = DEFAULTS[kind] if model.can_predict else ()
    wanted = [name for name in dict.fromkeys(names) if name != "loss"]
    problems = [problem for name in wanted if (problem := _problem(name, kind, schema, model))]
    if problems:
        raise SpecError(
            f"{asked_by} cannot be measured",
            problems=problems,
            next_step=f"choose from {', '.join([*(['loss'] if asked_by == 'evaluate.metrics' else []), *_fitting(kind)])}",
        )
    one = schema.num_classes if kind == "classification" else math.prod(schema[schema.label].shape) if schema.label else 0
    makers = {name: partial(_OF_KIND[kind][name], one or 0) for name in wanted}
    return MetricSet(makers, schema, raw=False, predicts=model.predicts)


def validation_metrics(best: BestSpec | None, schema: FeedSchema, model: Predicts) -> MetricSet:
    """Make the metrics of a validation: the recipe's own, or those that fit the label and the one that picks the best.

    Raises:
        SpecError: `train.checkpoint.best` names a metric that cannot be measured here.
    """
    usual = make_metrics(None, schema, model)
    if best is None:
        return usual
    name = best.metric.removeprefix("val/")
    if name == "loss" or name in usual.makers:
        return usual
    if not usual.raw and name in _fitting(label_kind(schema)):
        return make_metrics([*usual.makers, name], schema, model)
    known = [f"val/{each}" for each in ("loss", *(usual.makers if usual.raw else _fitting(label_kind(schema))))]
    raise SpecError(
        f"train.checkpoint.best.metric is {best.metric!r}, which validation does not measure{did_you_mean(best.metric, known)}",
        next_step=f"choose one of {', '.join(known)}",
    )


def prepare_predictions(output: Tensor, schema: FeedSchema, predicts: ClassScores = "logits") -> Tensor:
    """Convert the output of `predict` to one form.

    Args:
        predicts: kind of the scores of classes.

    Returns:
        Classification: probabilities [rows, classes]. Regression: values [rows], or as the label has them; several labels:
        probabilities of that shape. float64 of the logits of up to 30 classes and if the output is, else float32.

    Raises:
        TrainingError: the shape does not fit the label, or declared probabilities are not probabilities.
    """
    output = output.detach() if output.dtype == torch.float64 else output.detach().float()
    shape = schema[schema.label].shape if schema.label is not None else ()
    if shape:
        if tuple(output.shape[1:]) != tuple(shape):
            wanted = ", ".join(["rows", *map(str, shape)])
            raise TrainingError(f"predict returned shape {list(output.shape)}; label {schema.label!r} needs [{wanted}]")
        if label_kind(schema) == "multilabel":
            output = output.flatten(1)
            return torch.sigmoid(_exact(output)) if predicts == "logits" else _checked(output, together=False)
        return output.flatten(1)
    if schema.num_classes is None:
        if output.ndim == 2 and output.shape[1] == 1:
            output = output[:, 0]
        if output.ndim != 1:
            raise TrainingError(f"predict returned shape {list(output.shape)}; a regression needs [rows]")
        return output
    classes = schema.num_classes
    if classes == 2 and (output.ndim == 1 or output.shape[1:] == (1,)):
        positive = output.reshape(-1) if predicts == "probabilities" else torch.sigmoid(output.reshape(-1).double())
        output = torch.stack([1.0 - positive, positive], dim=1)
        return _checked(output) if predicts == "probabilities" else output
    if output.ndim != 2 or output.shape[1] != classes:
        raise TrainingError(f"predict returned shape {list(output.shape)}; label {schema.label!r} needs [rows, {classes}]")
    if predicts == "probabilities":
        return _checked(output)
    return torch.softmax(_exact(output), dim=1)


def _exact(logits: Tensor) -> Tensor:
    """Return them as float64: in float32 all above 17 would be 1, and areas under curves go by the order of rows."""
    return logits.double() if _thresholds(logits.shape[1]) is None else logits


def _checked(probabilities: Tensor, *, together: bool = True) -> Tensor:
    """Return them without what rounding adds: torchmetrics takes a batch with 1.0000001 for logits."""
    found = probabilities.clamp(0.0, 1.0)
    if bool(((found - probabilities).abs() > SUM_TOLERANCE).any()) or (together and not are_probabilities(found)):
        wrong = "are negative or do not sum to 1" if together else "are not all from 0 to 1"
        raise TrainingError(
            f'the recipe sets predicts = "probabilities", but predict returned rows that {wrong}',
            next_step='return probabilities, or logits with predicts = "logits"',
        )
    return found


def _mcc(matrix: Tensor) -> Tensor:
    """Compute Matthews' correlation of a confusion matrix, [classes, classes]; 0, as in scikit-learn, for a constant answer."""
    rows, true, guessed = matrix.sum(), matrix.sum(1), matrix.sum(0)
    spread = ((rows**2 - guessed.square().sum()) * (rows**2 - true.square().sum())).sqrt()
    return torch.where(spread > 0, (matrix.trace() * rows - (true * guessed).sum()) / spread, 0.0).clamp(-1.0, 1.0)


def prepare_target(target: Tensor, schema: FeedSchema) -> Tensor:
    """Convert the label for torchmetrics: int64 [rows] for classes, float64 [rows] for numbers; [rows, n] for n of them.

    Raises:
        TrainingError: integers that are to be several labels are not 0 or 1.
    """
    if schema.label is not None and schema[schema.label].shape:
        if label_kind(schema) == "multilabel" and bool(((target != 0) & (target != 1)).any()):
            raise TrainingError(
                f"label {schema.label!r} holds {schema[schema.label].type_text}, not all 0 or 1: they are not several labels",
                next_step="give the recipe metrics() of its own, or one label a row; numbers of a regression are floats",
            )
        return target.flatten(1).long() if label_kind(schema) == "multilabel" else target.flatten(1).double()
    target = target.reshape(len(target))
    return target.long() if schema.num_classes is not None else target.double()


def _fitting(kind: LabelKind) -> list[str]:
    return sorted(_OF_KIND[kind])


def _problem(name: str, kind: LabelKind, schema: FeedSchema, model: Predicts) -> str | None:
    known = {**CLASSIFICATION, **REGRESSION}
    if name not in known:
        return f"{name!r} is unknown{did_you_mean(name, known, most=2, cutoff=0.5)}"
    if kind == "none":
        return f"{name!r} needs a label; set data.label"
    if name not in _fitting(kind):
        needed = "classes" if name in CLASSIFICATION else "numbers"
        facts = {"classification": f"{schema.num_classes} classes", "multilabel": "several of them in a row"}
        fact = facts.get(kind, "a number")
        return f"{name!r} is for labels that are {needed}; {schema.label!r} is {fact}"
    return None if model.can_predict else f"{name!r} needs {missing_part(model)}"


def _fill_empty_states(metrics: Mapping[str, Metric]) -> None:
    """Give a rank without rows empty states of the other ranks' types and shapes. A collective if metrics keep rows.

    torchmetrics sends float32 of one axis for a list without rows, and the ranks' collectives then do not match.
    """
    kept = {
        (name, state): values
        for name, metric in metrics.items()
        for state, values in metric.metric_state.items()
        if isinstance(metric._defaults[state], list)
    }
    if not kept or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = {key: (values[0].dtype, values[0].shape[1:]) for key, values in kept.items() if values}
    forms: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(forms, own)
    for name, state in kept.keys() - own.keys():
        found = next((of_rank[name, state] for of_rank in forms if (name, state) in of_rank), None)
        if found is not None:
            empty = torch.empty((0, *found[1]), dtype=found[0], device=metrics[name].device)
            setattr(metrics[name], state, [empty])


def _check_own(own: Mapping[str, Any], model: Predicts) -> None:
    kind = metric_library().Metric
    problems = [f"{n!r} is a {type(m).__name__}, not a torchmetrics.Metric" for n, m in own.items() if not isinstance(m, kind)]
    if own and not model.can_predict:
        problems.append(f"they need {missing_part(model)}")
    if problems:
        raise SpecError("the recipe's metrics() cannot be measured", problems=problems)


def _update(name: str, metric: Metric, prediction: Tensor, target: Tensor | None) -> None:
    exact = prediction.device.type == "cpu" or (name in CLASSIFICATION and name not in _SUMS_FLOATS)
    try:
        # In deterministic mode torchmetrics counts by a table of [rows, classes * classes].
        with any_algorithm() if exact else nullcontext():
            metric.update(prediction, *([] if target is None else [target]))
    except (TypeError, ValueError, RuntimeError) as error:  # the first for a label that is not there
        shapes = f"predictions {list(prediction.shape)} {prediction.dtype}" + (
            "" if target is None else f", labels {list(target.shape)} {target.dtype}"
        )
        raise TrainingError(f"metric {name!r} cannot be updated with {shapes}: {error}") from error


def _scalars(name: str, value: Any) -> dict[str, float]:
    """Name a metric's values: one number, or one per class or entry of a dict."""
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(item) for key, item in value.items()}
    if isinstance(value, Tensor) and value.numel() > 1:
        return {f"{name}_{index}": float(item) for index, item in enumerate(value.reshape(-1).tolist())}
    return {name: float(value)}
