"""When is a new model better than the one that holds the alias? The decision alone; tests/runs/test_promotion.py runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.tracking import MlflowClient
from sklearn.metrics import f1_score, roc_auc_score

from penstock.errors import SpecError
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.tasks.model.promote import below_floors, weigh
from penstock.training.evaluation.paired import Paired, Scorer, compare_paired
from penstock.training.registry.mlflow_registry import MLFLOW
from penstock.training.spec import EvaluateSpec, PromoteSpec

COLUMNS = (ColumnInfo(name="x", dtype="float32"), ColumnInfo(name="y", dtype="int64"))
TWO = FeedSchema(columns=COLUMNS, label="y", num_classes=2, classes=("no", "yes"))


def test_a_metric_of_chosen_rows_is_scikit_learns_and_the_interval_knows_that_both_saw_the_same_rows() -> None:
    rng = np.random.default_rng(3)
    target = rng.integers(0, 2, 300)
    good = np.clip(rng.normal(0.25 + 0.5 * target, 0.25), 0.01, 0.99)
    scores = {name: np.stack([1 - p, p], axis=1).astype(np.float32) for name, p in (("good", good), ("half", 0.5 * good))}
    rows = rng.integers(0, 300, 300)
    assert Scorer("auroc", TWO, scores["good"], target)(rows) == pytest.approx(
        roc_auc_score(target[rows], good[rows]), abs=1e-6
    )
    f1 = {name: Scorer("f1", TWO, values, target) for name, values in scores.items()}
    assert f1["good"]() == pytest.approx(f1_score(target, good > 0.5), abs=1e-6)
    same = compare_paired(f1["good"], f1["good"], 300)
    assert (same.difference, same.low, same.high) == (0, 0, 0), "what is hard for both is no difference"
    paired = compare_paired(f1["half"], f1["good"], 300)
    assert paired.low < paired.difference < paired.high and paired.low > 0
    assert np.isnan(compare_paired(f1["half"], f1["good"], 1).low), "one row is no sample"


def test_the_alias_moves_for_a_gain_as_large_as_asked_for() -> None:
    for metric, before, after, min_gain, moves in (
        ("test/accuracy", 0.8, 0.9, 0.0, True),
        ("test/accuracy", 0.8, 0.8, 0.0, False),
        ("test/accuracy", 0.8, 0.85, 0.1, False),
        ("test/rmse", 2.0, 1.0, 0.5, True),
        ("test/rmse", 1.0, 2.0, 0.0, False),
        ("test/accuracy", 0.8, float("nan"), 0.0, False),
    ):
        policy = PromoteSpec(metric=metric, min_gain=min_gain)
        moved, said = weigh(policy, Paired(50, before, after, -0.1, 0.1), "2", "1")
        assert moved is moves and "95 % interval [-0.1000, +0.1000]) on the same 50 rows" in said


def test_a_slice_below_its_floor_is_named() -> None:
    slices = [
        {"split": "test", "column": "country", "slice": "country=France", "rows": 7, "accuracy": 0.7},
        {"split": "test", "column": "country", "slice": "country=Chile", "rows": 3, "accuracy": 0.9},
        {"split": "validation", "column": "country", "slice": "country=Chile", "rows": 3, "accuracy": 0.1},
    ]
    wanted = PromoteSpec(metric="test/accuracy", floors={"country": 0.6, "country=Chile": 0.9})
    assert below_floors(wanted, slices) is None
    strict = below_floors(PromoteSpec(metric="test/accuracy", floors={"country": 0.8}), slices)
    assert strict == "test/accuracy is 0.7000 on the 7 rows of country=France, its floor is 0.8"
    gone = below_floors(PromoteSpec(metric="test/accuracy", floors={"country=Peru": 0.8}), slices)
    assert gone == "there is no slice 'country=Peru' of test to hold against its floor"


def test_the_edges_of_a_slice_go_up() -> None:
    with pytest.raises(ValueError, match="the edges of a column go up"):
        EvaluateSpec(slices=[{"age": [30, 18]}])


def test_an_alias_and_the_one_before_change_places(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    client.create_registered_model("m")
    run_id = client.create_run(client.create_experiment("e", tmp_path.as_uri())).info.run_id
    for weights in ("a", "b"):
        client.create_model_version("m", "file:///nowhere", run_id, tags={"penstock.weights_digest": weights})
    assert MLFLOW.aliases(uri, "other") == {}
    MLFLOW.give_alias(uri, "m", "live", "1")
    with pytest.raises(SpecError, match=r"nothing to roll alias 'live' back to: live is version 1"):
        MLFLOW.roll_back(uri, "m", "live")
    for _ in range(2):
        MLFLOW.give_alias(uri, "m", "live", "2")
        assert MLFLOW.aliases(uri, "m") == {"live": "2", "previous": "1"}
    assert MLFLOW.roll_back(uri, "m", "live") == ("1", "2")
    assert MLFLOW.aliases(uri, "m") == {"live": "1", "previous": "2"}
    assert MLFLOW.rolled_back(uri, "m", "live", "b") and MLFLOW.rolled_back(uri, "m", "other", "b") is None
    assert MLFLOW.roll_back(uri, "m", "live") == ("2", "1"), "once more undoes it"
    assert MLFLOW.rolled_back(uri, "m", "live", "b") is None and MLFLOW.rolled_back(uri, "m", "live", "a")


class Killed(BaseException):
    """What no handler of errors sees."""


def test_a_rollback_that_is_killed_after_any_write_is_completed_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    run_id = client.create_run(client.create_experiment("e", tmp_path.as_uri())).info.run_id
    writes = ("set_model_version_tag", "delete_model_version_tag", "set_registered_model_alias")
    done = 0

    def killed_after(name: str, last: int) -> bool:
        """Whether a rollback was killed right after its `last`-th write; False if it has fewer."""
        made = 0

        def counting(write: str) -> Callable[..., Any]:
            original = getattr(MlflowClient, write)

            def call(*args: Any, **named: Any) -> None:
                nonlocal made
                original(*args, **named)
                made += 1
                if made == last:
                    raise Killed

            return call

        with monkeypatch.context() as patch:
            for write in writes:
                patch.setattr(MlflowClient, write, counting(write))
            try:
                MLFLOW.roll_back(uri, name, "live")
            except Killed:
                return True
        return False

    for last in range(1, 20):
        name = f"m{last}"
        client.create_registered_model(name)
        for weights in ("a", "b"):
            client.create_model_version(name, "file:///nowhere", run_id, tags={"penstock.weights_digest": weights})
        for version in ("1", "2"):
            MLFLOW.give_alias(uri, name, "live", version)
        for _ in range(2):  # so that version 1 has lost the alias once, and the tag of that is to be taken away
            MLFLOW.roll_back(uri, name, "live")
        if not killed_after(name, last):
            break
        done += 1
        if MLFLOW.aliases(uri, name) != {"live": "1", "previous": "2"}:
            assert MLFLOW.roll_back(uri, name, "live") == ("1", "2")
        assert MLFLOW.aliases(uri, name) == {"live": "1", "previous": "2"}
        assert MLFLOW.rolled_back(uri, name, "live", "b") and MLFLOW.rolled_back(uri, name, "live", "a") is None
        assert MLFLOW.roll_back(uri, name, "live") == ("2", "1"), "once more undoes it, as ever"
    assert done == 6
