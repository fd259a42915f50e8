"""When are numbers and a registered model believed? While they are of the weights training ends with, where MLflow is now."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from mlflow.tracking import MlflowClient

from penstock.storage import Storage
from penstock.tasks.context import RunContext
from penstock.tasks.evaluate import STAGE as EVALUATE
from penstock.tasks.project import Project
from penstock.tasks.records.ledger import Ledger, Run
from penstock.tasks.register import STAGE as REGISTER
from penstock.tasks.stage import VerifyContext
from penstock.training.registry.mlflow_registry import MLFLOW

STORAGE = Storage("memory://model-stages")

PROJECT = cast("Project", SimpleNamespace(registry=MLFLOW, storage=STORAGE, spec=SimpleNamespace(name="p")))
"""Neither stage looks at more of the project."""


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Callable[..., VerifyContext]:
    """What a stage looks at, with MLflow at the given address."""

    def made(tracking_uri: str, weights: str = "w1") -> VerifyContext:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
        return VerifyContext(PROJECT, "r", deep=False, upstream={"train": {"weights_digest": weights}})

    return made


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    client.create_registered_model("m")
    run_id = client.create_run(client.create_experiment("e", (tmp_path_factory.getbasetemp() / "e").as_uri())).info.run_id
    version = client.create_model_version("m", "file:///nowhere", run_id).version
    return {
        "name": "m",
        "version": str(version),
        "uri": f"models:/m/{version}",
        "run_id": run_id,
        "alias": "candidate",
        "tracking_uri": uri,
        "weights_digest": "w1",
    }


def test_unchanged_model_stages_are_reused(context: Callable[..., VerifyContext], registered: dict[str, Any]) -> None:
    uri = registered["tracking_uri"]
    assert REGISTER.verify(context(uri), registered) is None
    assert EVALUATE.verify(context(uri), {"weights_digest": "w1"}) is None
    # A plan that does not know the training's output has nothing to hold against them.
    assert EVALUATE.verify(VerifyContext(PROJECT, "r", deep=False), {"weights_digest": "w1"}) is None
    # The same store under another address: it was moved with its folder, or its server has another name.
    moved = {**registered, "tracking_uri": "sqlite:////elsewhere/mlflow.db"}
    assert REGISTER.verify(context(uri), moved) is None


def test_other_weights_are_evaluated_and_registered_again(
    context: Callable[..., VerifyContext], registered: dict[str, Any]
) -> None:
    problem = "it is of weights w1, and training now ends with w2"
    assert EVALUATE.verify(context("", "w2"), {"weights_digest": "w1"}) == problem
    assert REGISTER.verify(context(registered["tracking_uri"], "w2"), registered) == problem


def test_model_whose_alias_moved_is_registered_again(context: Callable[..., VerifyContext], registered: dict[str, Any]) -> None:
    ledger, uri = Ledger(STORAGE), registered["tracking_uri"]
    own, other = (Run(run=name, pipeline="p", created="", spec={}) for name in ("r", "o"))
    for run, model, alias in ((own, "m", "candidate"), (other, "m", "tried"), (other, "n", "candidate")):
        ledger.note_alias(run, model, alias)
    assert REGISTER.verify(context(uri), registered) is None
    ledger.note_alias(other, "m", "candidate")
    assert REGISTER.verify(context(uri), registered) == "run o has given alias 'candidate' to its own version since"
    assert REGISTER.verify(context(uri), {**registered, "alias": None}) is None
    ledger.note_alias(own, "m", "candidate")


def test_reused_register_stage_shows_present_alias(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri = registered["tracking_uri"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    spec = SimpleNamespace(register_=SimpleNamespace(alias="candidate"))
    outcomes = {"evaluate": SimpleNamespace(outcome="reused")}
    project = SimpleNamespace(registry=MLFLOW, spec=spec)
    ctx = cast("RunContext", SimpleNamespace(project=project, state_dir=tmp_path, outcomes=outcomes))
    moved = REGISTER.as_of_now(ctx, {**registered, "tracking_uri": "sqlite:////elsewhere/mlflow.db"})
    assert moved["tracking_uri"] == uri, "the address that loads it now"

    def said() -> str:
        return dict(REGISTER.facts(REGISTER.as_of_now(ctx, registered)))["alias"]

    client = MlflowClient(uri, registry_uri=uri)
    assert said() == "none: candidate is at no version"
    client.set_registered_model_alias("m", "candidate", "1")
    assert said() == "candidate"
    other = client.create_model_version("m", "file:///nowhere", registered["run_id"]).version
    client.set_registered_model_alias("m", "candidate", other)
    assert said() == f"none: candidate is at version {other}"


def test_reused_version_is_described_by_new_metrics(
    registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri = registered["tracking_uri"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = MlflowClient(uri, registry_uri=uri)
    client.update_model_version("m", registered["version"], "Result: test/accuracy 0.8700\n\nTrained by run [r](#/page)")
    measured = {"metrics": {"test/accuracy": 0.66}, "step": 7, "best_by": None}
    ran = SimpleNamespace(outcome="ran", output=measured)
    spec = SimpleNamespace(register_=SimpleNamespace(alias=None), train=None)
    project = SimpleNamespace(registry=MLFLOW, spec=spec)
    ctx = cast("RunContext", SimpleNamespace(project=project, state_dir=tmp_path, outcomes={"evaluate": ran}))
    REGISTER.as_of_now(ctx, registered)
    described = client.get_model_version("m", registered["version"]).description
    assert described == "Result: test/accuracy 0.6600\n\nTrained by run [r](#/page)"


def test_other_mlflow_or_deleted_version_registers_again(
    context: Callable[..., VerifyContext], registered: dict[str, Any], tmp_path: Path
) -> None:
    problem = REGISTER.verify(context(f"sqlite:///{tmp_path}/other.db"), registered)
    assert problem is not None and "other.db" in problem
    uri = registered["tracking_uri"]
    MlflowClient(uri, registry_uri=uri).delete_model_version("m", registered["version"])
    assert REGISTER.verify(context(uri), registered) == "version 1 of model m is no longer in the registry"
