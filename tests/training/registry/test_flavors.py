"""Does MLflow's own loader of a library read a registered model's folder?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightgbm
import mlflow.lightgbm
import mlflow.xgboost
import numpy as np
import pytest
import xgboost
from mlflow.models import Model

from penstock.ingest.schema import FeedSchema
from penstock.training.model import ModelSpec
from penstock.training.registry.register import add_flavors
from penstock.usercode.capture import UserCode

ROWS, LABELS = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 2


def trees(library: str, file: Path) -> Any:
    if library == "xgboost":
        grown = xgboost.train({}, xgboost.DMatrix(ROWS, LABELS), 3)
    else:
        grown = lightgbm.train({"verbose": -1, "min_data_in_leaf": 2}, lightgbm.Dataset(ROWS, LABELS), 3)
    grown.save_model(str(file))
    return grown


@pytest.mark.parametrize(("library", "file"), [("xgboost", "model.ubj"), ("lightgbm", "model.txt")])
def test_the_librarys_own_trees_come_back(tmp_path: Path, library: str, file: str) -> None:
    (tmp_path / "artifacts").mkdir()
    grown = trees(library, tmp_path / "artifacts" / file)
    Model(flavors={"python_function": {"loader_module": "penstock"}}).save(str(tmp_path / "MLmodel"))
    code = UserCode.model_construct(target="", files={}, versions={}, digest="")
    loader = f"penstock.training.frameworks.{library}.loading:load"
    spec = ModelSpec.model_construct(
        code=code, params={}, feed_schema=FeedSchema(columns=()), loader=loader, requires={library: "1"}
    )
    add_flavors(spec, tmp_path)
    found = {"xgboost": mlflow.xgboost, "lightgbm": mlflow.lightgbm}[library].load_model(str(tmp_path))
    given = xgboost.DMatrix(ROWS) if library == "xgboost" else ROWS
    assert np.array_equal(found.predict(given), grown.predict(given))
    assert set(Model.load(str(tmp_path)).flavors) == {"python_function", library}
