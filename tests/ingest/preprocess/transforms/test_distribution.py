"""Power and quantile transforms do what scikit-learn's do; scalers take vectors place by place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn.preprocessing import PowerTransformer, QuantileTransformer, StandardScaler

from penstock.errors import DataError
from penstock.ingest.preprocess.chain import Chain
from tests.ingest.preparing import Source, apply_chain

RNG = np.random.default_rng(5)
SKEWED = np.concatenate([RNG.lognormal(1, 1.5, 3000), np.full(200, 2.5)])
VALUES = {"skewed": SKEWED, "negative": -SKEWED + 40, "whole": RNG.poisson(3, 3200).astype(np.float64)}


def prepared(folder: Path, values: np.ndarray, step: dict[str, Any]) -> tuple[np.ndarray, Source]:
    """The column `x` after `step`, of three files."""
    files = {f"train/{n}.parquet": pa.table({"x": part}) for n, part in enumerate(np.array_split(values, 3))}
    source = Source.of(folder, files, [step])
    return source.column(source.materialize(), "x"), source


@pytest.mark.parametrize("name", list(VALUES))
def test_power_yeo_johnson_equals_scikit_learn(name: str, tmp_path: Path) -> None:
    found, _ = prepared(tmp_path, VALUES[name], {"power": {"columns": ["x"]}})
    expected = PowerTransformer("yeo-johnson").fit_transform(VALUES[name][:, None])[:, 0]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_power_box_cox_equals_scikit_learn(tmp_path: Path) -> None:
    step = {"power": {"columns": ["x"], "method": "box_cox"}}
    found, _ = prepared(tmp_path, SKEWED, step)
    expected = PowerTransformer("box-cox").fit_transform(SKEWED[:, None])[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(DataError, match="box_cox takes numbers above 0"):
        prepared(tmp_path / "b", VALUES["negative"], step)


@pytest.mark.parametrize("name", list(VALUES))
@pytest.mark.parametrize("output", ["uniform", "normal"])
def test_quantile_equals_scikit_learn(name: str, output: str, tmp_path: Path) -> None:
    found, source = prepared(tmp_path, VALUES[name], {"quantile": {"columns": ["x"], "quantiles": 200, "output": output}})
    theirs = QuantileTransformer(n_quantiles=200, output_distribution=output, subsample=None).fit(VALUES[name][:, None])
    np.testing.assert_allclose(found, theirs.transform(VALUES[name][:, None])[:, 0], atol=2e-5)
    beyond = np.array([-1e9, 1e9, 3.0])
    chain = Chain(source.data, source.steps, source.fit(), {})
    made = apply_chain(chain, pa.table({"x": beyond})).column("x").to_numpy()
    np.testing.assert_allclose(made, theirs.transform(beyond[:, None])[:, 0], atol=2e-5)


def test_scaler_vectors_are_scaled_by_place(tmp_path: Path) -> None:
    vectors = RNG.normal([0, 100, -3], [1, 50, 0.1], (3000, 3))
    vectors[7, 1] = np.nan  # its row goes, and the place learns from the others
    column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), 3)
    files = {f"train/{n}.parquet": pa.table({"x": column.slice(n * 1000, 1000)}) for n in range(3)}
    source = Source.of(tmp_path, files, [{"standard_scaler": {"columns": ["x"]}}], invalid="drop")
    found = source.column(source.materialize(), "x")
    expected = StandardScaler().fit(vectors).transform(np.delete(vectors, 7, axis=0))
    assert found.dtype == np.float32 and found.shape == (2999, 3)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    (state,) = source.fit().steps[0].columns
    assert state.centers is not None and len(state.centers) == 3 and state.center is None


def test_scaler_unequal_lists_are_refused(tmp_path: Path) -> None:
    source = Source.of(
        tmp_path, {"train/a.parquet": pa.table({"x": [[1.0], [1.0, 2.0]]})}, [{"standard_scaler": {"columns": ["x"]}}]
    )
    with pytest.raises(DataError, match="lists of unequal length"):
        source.fit()
