"""When is a new model better than the one that holds the alias? Here with registered regressions; tests/runs/test_promote.py
runs it for classes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from mlflow.tracking import MlflowClient
from safetensors.torch import save_file
from sklearn.metrics import f1_score, roc_auc_score

from penstock.errors import DataError, SpecError
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.transform_spec import FittedPreprocess, FittedTransform, TransformSpec
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.storage import Storage
from penstock.tasks.context import RunContext
from penstock.tasks.model.alias import Promotion, promote
from penstock.tasks.model.held_out import HeldOut
from penstock.tasks.promote import compare
from penstock.tasks.promote.compare import Scorer
from penstock.tasks.promote.decide import below_floors, weigh
from penstock.tasks.records.ledger import Ledger, Run
from penstock.tasks.register import other_answers
from penstock.tasks.spec import PipelineSpec
from penstock.training.evaluation.paired import Paired, compare_paired
from penstock.training.model import ModelSpec
from penstock.training.registry.loaded_model import MODEL_FILE
from penstock.training.registry.mlflow_registry import MLFLOW
from penstock.training.registry.raw_rows import raw_form
from penstock.training.registry.registry import WEIGHTS_TAG, Registered
from penstock.training.spec import EvaluateSpec, PromoteSpec
from penstock.usercode.capture import capture
from tests.ingest.preparing import Source

COLUMNS = (ColumnInfo(name="x", dtype="float32"), ColumnInfo(name="y", dtype="int64"))
TWO = FeedSchema(columns=COLUMNS, label="y", num_classes=2, classes=("no", "yes"))


@pytest.mark.drill
def test_paired_metric_and_interval_match_scikit_learn() -> None:
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
    assert (same.difference, same.low, same.high) == (0, 0, 0), "a row that is hard for both makes no difference"
    paired = compare_paired(f1["half"], f1["good"], 300)
    assert paired.low < paired.difference < paired.high and paired.low > 0
    assert np.isnan(compare_paired(f1["half"], f1["good"], 1).low), "one row is not a sample"


@pytest.mark.drill
def test_rows_of_one_class_leave_area_undecided() -> None:
    scores = np.stack([np.linspace(0.1, 0.9, 4), np.linspace(0.9, 0.1, 4)], axis=1).astype(np.float32)
    good, bad = (Scorer("auroc", TWO, given, np.array([1, 0, 0, 0])) for given in (scores, scores[:, ::-1].copy()))
    assert (good(), bad(), good.undefined) == (1.0, 0.0, None)
    paired = compare_paired(bad, good, 4)
    assert paired.low == paired.high == 1, "a third of the draws hold one class, and do not count as zeros"
    assert np.isnan(good(np.array([1, 2, 2]))) and good.undefined == "all rows are of one class"
    alike = Scorer("auroc", TWO, scores, np.zeros(4, np.int64))
    assert np.isnan(compare_paired(alike, alike, 4).low)


def test_alias_moves_for_min_gain() -> None:
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


def test_bound_met_exactly_in_float32_is_met() -> None:
    for size in range(1, 60):
        for part in range(size + 1):
            share = float(np.float32(part) / np.float32(size))
            entry = {"split": "test", "column": "a", "slice": "a=1", "rows": size, "accuracy": share}
            assert below_floors(PromoteSpec(metric="test/accuracy", floors={"a": part / size}), [entry]) is None
            later = Paired(size, share, float(np.float32(share + 0.005)), -0.1, 0.1)
            assert weigh(PromoteSpec(metric="test/accuracy", min_gain=0.005), later, "2", "1")[0]
    assert not weigh(PromoteSpec(metric="test/accuracy", min_gain=0.00501), later, "2", "1")[0]


def test_slice_below_floor_is_named() -> None:
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
    assert gone == "test has no slice 'country=Peru' to compare with its floor"


def test_undefined_slice_breaks_only_its_own_floor() -> None:
    def entry(name: str, value: float | None) -> dict[str, Any]:
        why = None if value is not None else "auroc: all rows are of class 'no'"
        return {"split": "test", "column": "to", "slice": f"to={name}", "rows": 3, "auroc": value, "not_defined": why}

    def below(slices: list[dict[str, Any]], **floors: float) -> str | None:
        return below_floors(
            PromoteSpec(metric="test/auroc", floors={key.replace("__", "="): x for key, x in floors.items()}), slices
        )

    both = [entry("Rome", 0.9), entry("Oslo", None)]
    said = "test/auroc is not defined (auroc: all rows are of class 'no') on the 3 rows of to=Oslo, its floor is 0.8"
    assert below(both, to=0.8) is None
    assert below(both, to__Oslo=0.8) == said
    assert below(both[1:], to=0.8) == said
    assert below([{**both[0], "auroc": 0.7}, both[1]], to=0.8) == (
        "test/auroc is 0.7000 on the 3 rows of to=Rome, its floor is 0.8"
    )


def test_slice_edges_must_increase() -> None:
    with pytest.raises(ValueError, match="the edges of a column must increase"):
        EvaluateSpec(slices=[{"age": [30, 18]}])


def test_rollback_exchanges_alias_and_previous(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    client.create_registered_model("m")
    experiment = client.create_experiment("e", tmp_path.as_uri())
    run_id = client.create_run(experiment).info.run_id
    for weights in ("a", "b"):
        model = client.create_logged_model(experiment, "m", source_run_id=run_id, tags={"penstock.weights_digest": weights})
        client.create_model_version("m", model.artifact_location, run_id)
    assert MLFLOW.aliases(uri, "other") == {}
    MLFLOW.give_alias(uri, "m", "live", "1")
    with pytest.raises(SpecError, match=r"nothing to roll alias 'live' back to: live is version 1"):
        MLFLOW.roll_back(uri, "m", "live")
    with pytest.raises(SpecError, match="model 'm' has no alias 'lvie'") as refused:
        MLFLOW.roll_back(uri, "m", "lvie")
    assert refused.value.next_step == "name one that it has (live), as in: penstock rollback m@ALIAS"
    for _ in range(2):
        MLFLOW.give_alias(uri, "m", "live", "2")
        assert MLFLOW.aliases(uri, "m") == {"live": "2", "live-previous": "1"}
    assert MLFLOW.roll_back(uri, "m", "live") == ("1", "2")
    assert MLFLOW.aliases(uri, "m") == {"live": "1", "live-previous": "2"}
    assert MLFLOW.rolled_back(uri, "m", "live", "b") and MLFLOW.rolled_back(uri, "m", "other", "b") is None
    assert MLFLOW.roll_back(uri, "m", "live") == ("2", "1"), "once more undoes it"
    assert MLFLOW.rolled_back(uri, "m", "live", "b") is None and MLFLOW.rolled_back(uri, "m", "live", "a")
    for version in ("1", "2"):
        MLFLOW.give_alias(uri, "m", "next", version)
    assert MLFLOW.roll_back(uri, "m", "live") == ("1", "2"), "what another alias lost does not count"
    with pytest.raises(SpecError, match="has no alias 'live-previous' to roll back"):
        MLFLOW.roll_back(uri, "m", "live-previous")


class Killed(BaseException):
    """What no handler of errors sees."""


@pytest.mark.drill
def test_killed_rollback_is_completed_by_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = MlflowClient(uri, registry_uri=uri)
    experiment = client.create_experiment("e", tmp_path.as_uri())
    run_id = client.create_run(experiment).info.run_id
    models = [
        client.create_logged_model(experiment, "m", run_id, tags={"penstock.weights_digest": weights}) for weights in "ab"
    ]
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
        for model in models:
            client.create_model_version(name, model.artifact_location, run_id)
        for version in ("1", "2"):
            MLFLOW.give_alias(uri, name, "live", version)
        for _ in range(2):  # so that version 1 has lost the alias once, and the tag of that is to be taken away
            MLFLOW.roll_back(uri, name, "live")
        if not killed_after(name, last):
            break
        done += 1
        if MLFLOW.aliases(uri, name)["live"] == "2":
            assert MLFLOW.roll_back(uri, name, "live") == ("1", "2")
        elif last == 3:
            with pytest.raises(SpecError, match="live is version 1; live-previous is version 1"):
                MLFLOW.roll_back(uri, name, "live")
        assert MLFLOW.aliases(uri, name)["live"] == "1"
        assert MLFLOW.rolled_back(uri, name, "live", "b") and MLFLOW.rolled_back(uri, name, "live", "a") is None
    assert done == 4


LINE = """
import torch

class Line:
    def build_model(self, schema):
        return torch.nn.Linear(1, 1)
    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(self.predict(model, batch), batch["y"])
    def predict(self, model, batch):
        return model(batch["x"].float()[:, None])[:, 0]
"""


class House:
    """A pipeline of a regression, y = 2 x, with versions of several slopes in a registry of its own."""

    def __init__(self, folder: Path) -> None:
        self.uri, self.folder = f"sqlite:///{folder}/mlflow.db", folder
        self.client = MlflowClient(self.uri, registry_uri=self.uri)
        self.client.create_registered_model("line")
        self.run_id = self.client.create_run(self.client.create_experiment("e", folder.as_uri())).info.run_id
        x = np.linspace(-1, 1, 80)
        rows = pa.table({"x": x, "y": (2 * x).astype(np.float32), "area": ["north", "south"] * 40})
        self.source = Source.of(
            folder, {"train/0.parquet": rows}, [{"drop": ["area"]}], validation=None, test={"fraction": 0.5}, label="y"
        )
        self.manifest = self.source.materialize()
        (folder / "line.py").write_text(LINE)

    def version(self, slope: float, *, column: str = "x", fitted: FittedPreprocess | None = None) -> Registered:
        """A version that says y = slope * column."""
        place = self.folder / f"v{slope}{column}"
        place.mkdir()
        example = pa.table({column: [0.5], "y": pa.array([1.0], pa.float32()), "area": ["north"]})
        form = raw_form(self.source.data, fitted or self.source.fit(), {}, example)
        spec = ModelSpec(
            code=capture("line.py:Line", self.folder),
            params={},
            feed_schema=self.manifest.feed_schema,
            loader="penstock.training.frameworks.torch.loading:load",
            raw=form.model_dump(mode="json"),
        )
        (place / MODEL_FILE).write_text(spec.model_dump_json())
        save_file({"weight": torch.tensor([[slope]]), "bias": torch.zeros(1)}, place / "model.safetensors")
        return self.registered(place)

    def registered(self, place: Path) -> Registered:
        """A version of whatever lies at `place`."""
        number = str(self.client.create_model_version("line", place.as_uri(), self.run_id).version)
        return Registered(name="line", version=number, uri=f"models:/line/{number}", alias="live", run_id=self.run_id)

    def promote(
        self,
        new: Registered,
        slices: list[dict[str, Any]] | None = None,
        weights: str = "",
        reported: dict[str, float | None] | None = None,
        **policy: Any,
    ) -> Promotion:
        """What the register stage decides about `new`, whose weights are of the digest `weights`."""
        code = {"recipe": "line.py:Line", "epochs": 1} if reported is None else {"loop": "line.py:train"}
        spec = PipelineSpec.model_validate(
            {
                "name": "house",
                "data": {"format": "parquet", "train": "train", "label": "y", "validation": None, "test": {"fraction": 0.5}},
                "preprocess": [{"drop": ["area"]}],
                "train": code,
                "evaluate": {"slices": ["area"]},
                "register": {"name": "line", "alias": "live", "promote": {"metric": "test/rmse", **policy}},
            }
        )
        context = SimpleNamespace(
            project=SimpleNamespace(spec=spec, registry=MLFLOW, transforms={}),
            snapshot=self.source.snapshot(),
            manifest=self.manifest,
            storage=self.source.storage,
            output=lambda _stage: {"slices": slices or []},
            ledger=Ledger(Storage(str(self.folder / "state"))),
            run=Run(run="r", pipeline="house", created="", spec={}),
            tracker=SimpleNamespace(set_tags=lambda _tags: None),
            reporter=SimpleNamespace(report=lambda _line: None),
        )
        return promote(cast("RunContext", context), self.uri, new, weights or f"weights of {new.version}", reported or {})

    def holder(self) -> str:
        return MLFLOW.aliases(self.uri, "line")["live"]


@pytest.mark.drill
def test_regression_alias_moves_for_smaller_error_above_floors(tmp_path: Path) -> None:
    house = House(tmp_path)
    assert house.promote(house.version(1.0)).moved and house.holder() == "1"
    better = house.promote(house.version(1.5), min_gain=0.1)
    assert better.moved and better.before == pytest.approx(2 * cast("float", better.after), rel=1e-5)
    assert better.rows == house.manifest.rows["test"] and house.holder() == "2"
    worse = house.promote(house.version(3.0))
    assert not worse.moved and worse.reason.endswith("it is not better")
    good = house.version(2.0)
    slices = [
        {"split": "test", "column": "area", "slice": f"area={name}", "rows": 9, "rmse": 0.5} for name in ("north", "south")
    ]
    refused = house.promote(good, slices, floors={"area=north": 0.4})
    assert not refused.moved and "test/rmse is 0.5000 on the 9 rows of area=north, its floor is 0.4" in refused.reason
    assert house.holder() == "2"
    assert house.promote(good, slices, floors={"area": 0.6}).moved and house.holder() == "4"


@pytest.mark.drill
def test_reported_value_moves_alias_on_equal_held_out_rows_only(tmp_path: Path) -> None:
    house = House(tmp_path)
    versions = [house.version(slope) for slope in (1.0, 1.5, 2.0, 2.5, 3.0)]
    by_score = {"metric": "score", "mode": "max"}
    untold = house.promote(versions[0], reported={"loss": 2.0}, **by_score)
    assert untold.moved and "no version held it" in untold.reason
    lacks = house.promote(versions[1], reported={"score": 0.9, "loss": 1.5}, **by_score)
    assert not lacks.moved and "version 1, which holds it, cannot be compared: 'score' was not reported" in lacks.reason
    better = house.promote(versions[1], reported={"score": 0.9, "loss": 1.5}, metric="loss", min_gain=0.5)
    assert better.moved and (better.before, better.after, house.holder()) == (2.0, 1.5, "2")
    worse = house.promote(versions[2], reported={"score": 0.8}, **by_score)
    assert not worse.moved and worse.reason.endswith(
        "reported score 0.8000, where version 2 has 0.9000 (-0.1000): it is not better"
    )
    none = house.promote(versions[3], reported={"score": None}, **by_score)
    assert not none.moved and none.reason.endswith("'score' was not reported with its checkpoint")
    digests = {**house.manifest.split_digests, "test": "of other rows"}
    house.manifest = house.manifest.model_copy(update={"split_digests": digests})
    other = house.promote(versions[4], reported={"score": 0.99}, **by_score)
    assert not other.moved and "cannot be compared: its score 0.9000 was reported on other held-out rows" in other.reason
    assert house.promote(versions[4], reported={"score": 0.99}, **by_score, otherwise="move").moved and house.holder() == "5"


@pytest.mark.drill
def test_new_holder_during_comparison_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(tmp_path)
    house.promote(house.version(1.0))
    best, compare_models = house.version(2.0), compare.compare_models

    def beside_another(*arguments: Any) -> compare.ModelsCompared:
        if house.holder() == "1":
            MLFLOW.give_alias(house.uri, "line", "live", best.version)  # as a pipeline of another storage does
        return compare_models(*arguments)

    monkeypatch.setattr(compare, "compare_models", beside_another)
    found = house.promote(house.version(1.5))
    assert not found.moved and found.holder == best.version == house.holder()


@pytest.mark.drill
def test_rolled_back_weights_never_get_alias_by_a_run(tmp_path: Path) -> None:
    house = House(tmp_path)
    first = house.version(1.0)
    experiment = house.client.get_run(house.run_id).info.experiment_id
    model = house.client.create_logged_model(experiment, "line", house.run_id, tags={WEIGHTS_TAG: "of 2"})
    lost = str(house.client.create_model_version("line", model.artifact_location, house.run_id).version)
    for version in (first.version, lost):
        MLFLOW.give_alias(house.uri, "line", "live", version)
    assert MLFLOW.roll_back(house.uri, "line", "live") == (first.version, lost)
    again = house.version(2.0)
    refused = house.promote(again, weights="of 2")
    assert (refused.moved, refused.holder, refused.metric) == (False, first.version, None)
    said = (
        r"alias 'live' is not given to version 3: its weights were rolled back at 20\d\d-.*; `penstock rollback line` once more"
    )
    assert re.match(said, refused.reason) and house.holder() == first.version
    assert house.client.get_model_version("line", again.version).tags["penstock.promotion"] == refused.reason
    assert house.promote(again, weights="of 3").moved and house.holder() == again.version


@pytest.mark.drill
def test_promote_unanswered_rows_keep_the_alias(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.promote(house.version(1.0))
    step = TransformSpec.model_validate({"ordinal": {"columns": ["area"]}})
    north_only = FittedTransform(step=step, columns=(ColumnState(column="area", categories=("north",)),))
    new = house.version(2.0, fitted=FittedPreprocess(steps=(north_only,)))
    stays = house.promote(new)
    assert not stays.moved and house.holder() == "1" and (stays.rows or 0) < house.manifest.rows["test"]
    lost = house.manifest.rows["test"] - (stays.rows or 0)
    assert f"version 2 has no answer to {lost} rows that version 1 answers, so it stays" in stays.reason
    moves = house.promote(new, otherwise="move")
    assert moves.moved and house.holder() == "2" and f"has no answer to {lost} rows" in moves.reason


@pytest.mark.drill
def test_promote_counts_rows_neither_answers(tmp_path: Path) -> None:
    house = House(tmp_path)
    step = TransformSpec.model_validate({"ordinal": {"columns": ["area"]}})
    north, west = (
        FittedPreprocess(steps=(FittedTransform(step=step, columns=(ColumnState(column="area", categories=(name,)),)),))
        for name in ("north", "west")
    )
    house.promote(house.version(1.0, fitted=north))
    found = house.promote(house.version(1.5, fitted=north))
    left = house.manifest.rows["test"] - (found.rows or 0)
    assert found.moved and left and found.reason.endswith(f"; neither version has an answer to {left} rows")
    none = house.promote(house.version(2.0, fitted=west))
    assert not none.moved and f"the new version answers none of {house.manifest.rows['test']} rows" in none.reason


def test_promote_counts_rows_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers:
        schema, can_predict = TWO, True

        def __init__(self, *failed: int) -> None:
            self._failed = failed

        def labels(self, table: pa.Table) -> Any:
            return np.array([np.nan, np.nan, 0, 1])

        def predict(self, table: pa.Table, on_error: str) -> Any:
            errors = pd.Series(["no" if row in self._failed else None for row in range(4)], dtype=object)
            chances = [None if error else [0.6, 0.4] for error in errors]
            return pd.DataFrame({"prediction": [0] * 4, "probabilities": chances, "error": errors})

    rows = [pa.table({"x": [0.0] * 4})] * 3
    new, holder = cast("Any", Answers(0, 1)), cast("Any", Answers(1))
    found = compare.compare_models(new, holder, "accuracy", rows[:1])
    assert (found.paired.rows, found.unanswered, found.lost, found.neither, found.cut) == (2, 0, 1, 1, False)
    monkeypatch.setattr(compare, "MOST_SCORES", 7)  # two rows a table, of two classes
    found = compare.compare_models(new, holder, "accuracy", rows)
    assert found.paired.rows == 4 and found.cut, "the third table is not read"
    assert not compare.compare_models(new, holder, "accuracy", rows[:2]).cut


def test_answer_of_class_unknown_to_new_model_is_wrong() -> None:
    class Answers:
        can_predict = True

        def __init__(self, classes: str, chances: list[list[float]]) -> None:
            self.schema = FeedSchema(columns=COLUMNS, label="y", num_classes=len(classes), classes=tuple(classes))
            self._chances = chances

        def labels(self, table: pa.Table) -> Any:
            return np.array([0, 1, 0, 1, np.nan])

        def predict(self, table: pa.Table, on_error: str) -> Any:
            return pd.DataFrame({"probabilities": self._chances, "error": np.array([None] * 5, object)})

    new = cast("Any", Answers("ab", [[0.7, 0.3], [0.3, 0.7], [0.7, 0.3], [0.6, 0.4], [0.5, 0.5]]))
    chances = [[0.06, 0.9, 0.04], [0.0, 1.0, 0.0], [0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.0, 1.0, 0.0]]
    holder = cast("Any", Answers("azb", chances))
    with pytest.raises(DataError, match="classes that the new version does not know, which auroc cannot count as wrong"):
        compare.compare_models(new, holder, "auroc", [pa.table({"x": [0.0] * 5})])
    for metric, after, before in (("accuracy", 0.75, 0.5), ("f1", 2 / 3, 0.5)):
        paired = compare.compare_models(new, holder, metric, [pa.table({"x": [0.0] * 5})]).paired
        assert (paired.rows, paired.after, paired.before) == (4, pytest.approx(after), pytest.approx(before)), metric


def test_scorer_ranks_tiny_probabilities() -> None:
    scores = np.array([[1 - 1e-15, 1e-15]] * 50 + [[1 - 1e-13, 1e-13]] * 5, np.float32)
    assert Scorer("auroc", TWO, scores, np.array([0] * 50 + [1] * 5))() == 1.0


@pytest.mark.drill
@pytest.mark.parametrize(
    ("holds", "words"),
    [
        (lambda house: house.registered(house.folder / "nothing"), "version 1, which holds it, cannot be compared: "),
        (lambda house: house.version(1.0, column="width"), "no column 'width'"),
    ],
)
def test_unloadable_holder_keeps_alias_unless_move(tmp_path: Path, holds: Callable[[House], Registered], words: str) -> None:
    house = House(tmp_path)
    (tmp_path / "nothing").mkdir()
    MLFLOW.give_alias(house.uri, "line", "live", holds(house).version)
    new = house.version(2.0)
    stays = house.promote(new)
    assert not stays.moved and words in stays.reason and house.holder() == "1"
    moves = house.promote(new, otherwise="move")
    assert moves.moved and words in moves.reason and house.holder() == "2"
    assert house.client.get_model_version("line", "2").tags["penstock.promotion"] == moves.reason


@pytest.mark.drill
def test_answers_unlike_those_of_evaluate_are_described(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.version(2.0)
    spec = ModelSpec.model_validate_json((tmp_path / "v2.0x" / MODEL_FILE).read_text())
    drop = [TransformSpec.model_validate({"drop": ["area"]})]
    held_out = HeldOut(house.source.data, house.source.snapshot(), drop, house.manifest, house.source.storage)
    rows, origin = next(held_out.raw("test"))

    def measured(slope: float) -> pa.Table:
        predicted = pa.array(slope * rows["x"].to_numpy(), pa.float32())
        files = pa.array(["train/0.parquet"] * rows.num_rows).dictionary_encode()
        return pa.table({"predicted": predicted, "file": files, "row": origin.rows})

    def said(slope: float) -> str | None:
        return other_answers(held_out, {"test": measured(slope)}.get, spec, tmp_path / "v2.0x")

    assert said(2.0) is None
    assert re.match(
        r"the registered model answers \d+ of \d+ rows otherwise .*, first train/0.parquet, row \d+; ", said(3.0) or ""
    )
    assert other_answers(held_out, lambda _: None, spec, tmp_path) is None, "nothing is on record"
