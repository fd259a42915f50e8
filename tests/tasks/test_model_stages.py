"""When are numbers and a registered model believed? While they are of the weights training ends with, where MLflow is now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlflow.tracking import MlflowClient

from penstock.tasks.evaluate import STAGE as EVALUATE
from penstock.tasks.project import Project
from penstock.tasks.register import STAGE as REGISTER
from penstock.tasks.stage import Look
from penstock.training.registry.mlflow_registry import MLFLOW

PROJECT = cast("Project", SimpleNamespace(registry=MLFLOW))
"""Neither stage looks at more of the project."""


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Look]:
    """What a stage looks at, with MLflow at the given address."""

    def looking(tracking_uri: str, weights: str = "w1") -> Look:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        return Look(PROJECT, "r", deep=False, upstream={"train": {"weights_digest": weights}})

    return looking


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    client.create_registered_model("m")
    run_id = client.create_run(client.create_experiment("e", (tmp_path_factory.getbasetemp() / "e").as_uri())).info.run_id
    version = client.create_model_version("m", "file:///nowhere", run_id).version
    return {"name": "m", "version": str(version), "run_id": run_id, "tracking_uri": uri, "weights_digest": "w1"}


def test_they_are_believed_while_all_is_as_it_was(look: Callable[..., Look], registered: dict[str, Any]) -> None:
    uri = registered["tracking_uri"]
    assert REGISTER.distrust(look(uri), registered) is None
    assert EVALUATE.distrust(look(uri), {"weights_digest": "w1"}) is None
    # A plan that does not know the training's output has nothing to hold against them.
    assert EVALUATE.distrust(Look(PROJECT, "r", deep=False), {"weights_digest": "w1"}) is None
    # The same store under another address: it was moved with its folder, or its server has another name.
    moved = {**registered, "tracking_uri": "sqlite:////elsewhere/mlflow.db"}
    assert REGISTER.distrust(look(uri), moved) is None


def test_other_weights_are_evaluated_and_registered_again(look: Callable[..., Look], registered: dict[str, Any]) -> None:
    doubt = "it is of weights w1, and training now ends with w2"
    assert EVALUATE.distrust(look("", "w2"), {"weights_digest": "w1"}) == doubt
    assert REGISTER.distrust(look(registered["tracking_uri"], "w2"), registered) == doubt


def test_another_mlflow_or_a_deleted_version_is_registered_again(
    look: Callable[..., Look], registered: dict[str, Any], tmp_path: Path
) -> None:
    doubt = REGISTER.distrust(look(f"sqlite:///{tmp_path}/other.db"), registered)
    assert doubt is not None and "other.db" in doubt
    uri = registered["tracking_uri"]
    MlflowClient(uri, registry_uri=uri).delete_model_version("m", registered["version"])
    assert REGISTER.distrust(look(uri), registered) == "version 1 of model m is no longer in the registry"
