"""Scalers take vectors place by place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sklearn.preprocessing import StandardScaler

from penstock.errors import DataError
from tests.ingest.preparing import Source

RNG = np.random.default_rng(5)


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
