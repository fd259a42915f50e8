"""How are the statistics computed that steps are fitted with: by Ray Data's preprocessors over a cluster, or in this process?

Both answer the same questions. What they find is written as (center, scale), a fill value or a list of categories.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ingest.fitted_state import Category, ColumnState
from ingest.fixed_shape import single_chunk
from ingest.parallel import quiet_ray_data, raising_the_original
from ingest.steps import PreprocessStep
from penstock.errors import DataError

if TYPE_CHECKING:
    import ray.data

__all__ = ["MAX_ONE_HOT", "Question", "ask_here", "ask_ray_data"]

_EPSILON = 1e-8
"""A spread up to this is that of a constant column: dividing by it would blow up rounding errors. As in ray.data."""

MAX_ONE_HOT = 10_000
"""A longer one-hot vector is a mistake: 40 KB a row, for what an embedding does with one integer."""


class Question(NamedTuple):
    """What a step wants to know about one column."""

    kind: str
    """The step's kind; `mean` and `most_frequent` for an imputer."""
    column: str
    is_numeric: bool
    """Whether the column is looked at as float64."""
    max_categories: int | None = None
    quantiles: tuple[float, float] = (0.25, 0.75)

    @classmethod
    def of(cls, step: PreprocessStep, column: str, type: pa.DataType) -> Question:
        """The question of one fitted step about one of its columns."""
        if step.imputer is not None:
            return cls(step.imputer.strategy, column, step.imputer.strategy == "mean")
        if step.kind in ("one_hot", "ordinal", "label_encoder"):
            return cls(step.kind, column, False, step.one_hot.max_categories if step.one_hot is not None else None)
        quantiles = step.robust_scaler.quantile_range if step.robust_scaler is not None else (0.25, 0.75)
        return cls(step.kind, column, True, None, quantiles)


Facts = dict[str, Any]
"""What was found out about a column, by the names that `_state` knows; a value is None where the column has no values."""


def ask_ray_data(
    questions: Sequence[Question], tables: Callable[[int], Iterator[pa.Table]], num_units: int
) -> list[ColumnState]:
    """Fit Ray Data's preprocessors. Runs on the driver; `tables(i)` runs in workers and yields the rows of unit `i`.

    The answer does not depend on the cluster: blocks are kept in order, so that sums over them round the same way.

    Raises:
        DataError: a column has no values.
    """
    import ray.data

    with quiet_ray_data(preserve_order=True), raising_the_original():
        units = ray.data.from_items([{"unit": unit} for unit in range(num_units)], override_num_blocks=num_units)
        rows = units.map_batches(lambda batch: tables(int(batch["unit"][0])), batch_size=1, batch_format="numpy")
        if len(questions) > 1:
            rows = rows.materialize()
        scaled = _ask_scalers(questions, rows)
        return [_state(q, scaled[q.column] if q.column in scaled else _ask_preprocessor(q, rows)) for q in questions]


def _ask_scalers(questions: Sequence[Question], rows: ray.data.Dataset) -> dict[str, Facts]:
    """Fit one preprocessor of each kind for all its columns together: facts by column."""
    from ray.data import preprocessors

    facts: dict[str, Facts] = {}
    # StandardScaler's mean is SimpleImputer's mean.
    for kinds, preprocessor, names in (
        (("standard_scaler", "mean"), preprocessors.StandardScaler, ("mean", "std")),
        (("min_max_scaler",), preprocessors.MinMaxScaler, ("min", "max")),
        (("max_abs_scaler",), preprocessors.MaxAbsScaler, ("abs_max",)),
    ):
        columns = [question.column for question in questions if question.kind in kinds]
        if columns:
            learnt = preprocessor(columns).fit(rows).stats_
            facts |= {column: {name: learnt[f"{name}({column})"] for name in names} for column in columns}
    return facts


def _ask_preprocessor(question: Question, rows: ray.data.Dataset) -> Facts:
    from ray.data import preprocessors

    fitted: dict[str, Any]
    column, kind = question.column, question.kind
    if kind == "robust_scaler":
        # Ray's RobustScaler asks a random sketch, which answers differently every time; quantiles of all values are exact.
        batches: Iterable[Any] = rows.select_columns([column]).iter_batches(batch_format="pyarrow", batch_size=None)
        return _quantiles(question, np.concatenate([_present(batch.column(column)) for batch in batches]))
    # Ray's encoders refuse nulls while fitting; a null is reported by materialize, with its file and row.
    present = rows.map_batches(lambda table: table.select([column]).drop_null(), batch_format="pyarrow", batch_size=None)
    if kind == "most_frequent":
        fitted = preprocessors.SimpleImputer([column], strategy="most_frequent").fit(present).stats_
        return {"fill": fitted[f"most_frequent({column})"]}
    if kind == "label_encoder":
        fitted = preprocessors.LabelEncoder(column).fit(present).stats_
    elif kind == "ordinal":
        fitted = preprocessors.OrdinalEncoder([column]).fit(present).stats_
    else:
        limit = {column: question.max_categories} if question.max_categories else None
        fitted = preprocessors.OneHotEncoder([column], max_categories=limit).fit(present).stats_
    index = fitted[f"unique_values({column})"]
    return {"categories": sorted(index, key=index.__getitem__)}


def ask_here(questions: Sequence[Question], tables: Iterable[pa.Table]) -> list[ColumnState]:
    """Compute the same in this process; all values of the columns are held in memory.

    Raises:
        DataError: a column has no values.
    """
    parts = list(tables)
    return [
        _state(q, _compute(q, pa.chunked_array([single_chunk(part.column(q.column)) for part in parts]))) for q in questions
    ]


def _compute(question: Question, column: pa.ChunkedArray) -> Facts:
    if question.is_numeric:
        values = _present(column)
        if not len(values):
            return {"mean": None, "min": None, "abs_max": None, "median": None}
        spread = {
            "mean": float(values.mean()),
            "std": float(values.std()),
            "min": float(values.min()),
            "max": float(values.max()),
        }
        return {**spread, "abs_max": float(np.abs(values).max()), **_quantiles(question, values)}
    counts = Counter(column.drop_null().to_pylist())
    if question.kind == "most_frequent":
        return {"fill": counts.most_common(1)[0][0] if counts else None}
    return {"categories": sorted(value for value, _ in counts.most_common(question.max_categories))}


def _present(column: pa.ChunkedArray) -> np.ndarray:
    return column.drop_null().to_numpy().astype(np.float64)


def _quantiles(question: Question, values: np.ndarray) -> Facts:
    if not len(values):
        return {"median": None}
    low, median, high = np.quantile(values, [question.quantiles[0], 0.5, question.quantiles[1]]).tolist()
    return {"low": low, "median": median, "high": high}


def _state(question: Question, facts: Facts) -> ColumnState:
    """Write facts as what the step applies; a spread of nothing becomes 1, so that a constant column becomes zeros."""
    kind, column = question.kind, question.column
    first = {"standard_scaler": "mean", "min_max_scaler": "min", "max_abs_scaler": "abs_max", "robust_scaler": "median"}
    needed = first.get(kind) or {"mean": "mean", "most_frequent": "fill"}.get(kind, "categories")
    if facts[needed] is None or facts[needed] == []:
        raise DataError(
            f"preprocess: {kind}: column {column!r} has no values in the train split",
            next_step=f"leave the column out (drop: [{column}]), or check the steps before",
        )
    if kind == "one_hot" and len(facts["categories"]) > MAX_ONE_HOT:
        raise DataError(
            f"preprocess: one_hot: column {column!r} has {len(facts['categories']):,} categories; vectors longer than "
            f"{MAX_ONE_HOT:,} are refused",
            next_step=f"use ordinal and an embedding, or keep the most frequent (max_categories: {MAX_ONE_HOT})",
        )
    if kind == "standard_scaler":
        return _scaling(column, facts["mean"], facts["std"], _EPSILON)
    if kind == "min_max_scaler":
        return _scaling(column, facts["min"], facts["max"] - facts["min"], _EPSILON)
    if kind == "max_abs_scaler":
        return _scaling(column, 0.0, facts["abs_max"], 0.0)
    if kind == "robust_scaler":
        return _scaling(column, facts["median"], facts["high"] - facts["low"], 0.0)
    if kind in ("mean", "most_frequent"):
        return ColumnState(column=column, fill=_plain(facts[needed]))
    return ColumnState(column=column, categories=tuple(_plain(value) for value in facts["categories"]))


def _scaling(column: str, center: float, scale: float, least: float) -> ColumnState:
    return ColumnState(column=column, center=float(center), scale=1.0 if scale <= least else float(scale))


def _plain(value: Any) -> Category:
    """A JSON value of the same type, from numpy's or pandas' own."""
    plain: Category = value.item() if isinstance(value, np.generic) else value
    return plain
