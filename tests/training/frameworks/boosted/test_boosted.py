"""Do boosted trees go on to the same trees, on two ranks, and what are they to evaluation and to a user?"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.datasets import load_breast_cancer

from penstock.errors import PenstockError, PreflightError, SpecError, TrainingError
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.plugins import Plugins
from penstock.storage import Storage
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.start_from import START, find_start
from penstock.training.evaluation.evaluate import evaluate
from penstock.training.events import Point
from penstock.training.frameworks.boosted.library import Library
from penstock.training.frameworks.boosted.rank import run_boosted_rank
from penstock.training.frameworks.boosted.table import FeatureTable, Task
from penstock.training.frameworks.registry import FRAMEWORKS
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, load_model
from penstock.training.on_ray.worker import RankResult
from penstock.training.open_feeds import open_job_feed
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import NO_CODE
from tests.guides.running import prepare, reports
from tests.training.digits import CPU, ListClient, make_job
from tests.training.ranks import run_ranks

LIBRARIES = ("xgboost", "lightgbm")
BEST = {"metric": "val/loss", "mode": "min"}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "xgboost": [{"max_depth": 3}, {"max_depth": 3, "subsample": 0.7, "colsample_bytree": 0.6}],
    "lightgbm": [{"num_leaves": 6}, {"num_leaves": 6, "feature_fraction": 0.6}],
}


def library(name: str) -> Library:
    if name == "xgboost":
        from penstock.training.frameworks.xgboost.library import LIBRARY as XGBOOST

        return XGBOOST
    from penstock.training.frameworks.lightgbm.library import LIBRARY as LIGHTGBM

    return LIGHTGBM


def boosted(folder: Path, name: str, run: str, **spec: Any) -> TrainJob:
    job = make_job(folder, run=run, attempt=spec.pop("attempt", 1), **{"epochs": 12, "workers": 2, **spec})
    values = {**job.spec.model_dump(exclude_unset=True), "framework": name, "recipe": None}
    return replace(job, spec=TrainSpec.model_validate(values), code=NO_CODE)


def boost(group: Group, jobs: list[tuple[str, TrainJob]]) -> list[RankResult | str]:
    """Train the jobs one after the other; of one that fails, the message."""
    made: list[RankResult | str] = []
    for name, job in jobs:
        try:
            made.append(run_boosted_rank(library(name), job, group, ListClient()))
        except PenstockError as error:
            made.append(str(error))
    return made


def trees_of_one_feature(name: str) -> bytes:
    rows, labels = np.arange(80.0).reshape(80, 1), np.arange(80) % 2
    if name == "xgboost":
        import xgboost

        return bytes(xgboost.train({}, xgboost.DMatrix(rows, labels, feature_names=["x"]), 2).save_raw("ubj"))
    import lightgbm

    data = lightgbm.Dataset(rows, labels, feature_name=["x"])
    return lightgbm.train({"verbosity": -1}, data, 2).model_to_string().encode()


def boost_in_a_thread(group: Group, job: TrainJob, said: Path) -> None:
    """As the flow tries a model: not in the thread that imported the library. What the process says goes to a file."""
    library("xgboost")
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 2)
    thread = threading.Thread(target=boost, args=(group, [("xgboost", job)]))
    thread.start()
    thread.join()


@pytest.mark.drill
def test_drawn_rows_bring_no_updater_warning(tmp_path: Path) -> None:
    job = boosted(tmp_path, "xgboost", "drawn", params={"max_depth": 3, "subsample": 0.7}, epochs=2, workers=1)
    run_ranks(boost_in_a_thread, 1, job, tmp_path / "said")
    assert job_checkpoints(job).committed()[0].manifest.step == 2
    assert "updater" not in (tmp_path / "said").read_text()


@pytest.mark.drill
@pytest.mark.parametrize("name", LIBRARIES)
def test_resumed_boosting_ends_with_same_trees_and_predictions(tmp_path: Path, name: str) -> None:
    jobs, pairs = [], []
    for number, params in enumerate(SETTINGS[name]):
        made = {"params": params, "checkpoint": {"every_s": None, "every_steps": 4, "best": BEST}}
        whole = boosted(tmp_path, name, f"whole-{number}", **made)
        part = boosted(tmp_path, name, f"part-{number}", **made, **{"epochs": 5})
        rest = boosted(tmp_path, name, f"part-{number}", **made, attempt=2)
        jobs += [(name, whole), (name, part), (name, rest)]
        pairs.append((whole, rest))
    results = run_ranks(boost, 2, jobs)[0]
    for (whole, rest), (first, _, second) in zip(pairs, zip(*[iter(results)] * 3, strict=True), strict=True):
        assert (first.status, second.status, second.resumed_from_step) == ("finished", "finished", 5)
        assert second.exactness == "bit-exact"
        ends = [job_checkpoints(job).committed()[0] for job in (whole, rest)]
        assert [end.manifest.step for end in ends] == [12, 12]
        assert ends[0].manifest.weights_digest == ends[1].manifest.weights_digest
        assert ends[0].manifest.metrics == ends[1].manifest.metrics
        models = [load_model(model_spec(name, job), end.storage) for job, end in zip((whole, rest), ends, strict=True)]
        batch = next(open_job_feed(whole, "test", 0, 1, CPU).batches(0))
        answers = [model.predict(batch.columns, batch.rows) for model in models]
        assert torch.equal(*answers) and answers[0].shape == (batch.rows, 10)
        assert torch.allclose(answers[0].sum(dim=1), torch.ones(batch.rows))
    for point in read_journal(whole.run_storage, 12):
        times = [(point.values[f"workers/{rank}/cpu_s"], point.values[f"workers/{rank}/step_s"]) for rank in (0, 1)]
        assert all(cpu_s > 0 and step_s > 0 for cpu_s, step_s in times)
    # Both ranks' rows are in the trees, and they are good for more than one rank's: chance is right in a tenth.
    found = evaluate(pairs[-1][0], models[0], splits=["validation", "test"])
    assert found.metrics["test/accuracy"] > 0.6
    assert found.metrics["val/loss"] == pytest.approx(ends[0].manifest.metrics["val/loss"], rel=1e-4)
    assert {"test-confusion_matrix.png", "feature_importance.png"} <= set(found.figures)
    assert found.tables["feature_importance"] == {"column": ["image"], "share": [1.0]}


@pytest.mark.drill
@pytest.mark.parametrize("name", LIBRARIES)
def test_trees_grow_on_those_of_another_run(tmp_path: Path, name: str) -> None:
    made = {"params": SETTINGS[name][1], "workers": 1, "checkpoint": {"every_s": None, "every_steps": 2}}
    nine = boosted(tmp_path, name, "nine", **made, epochs=9)
    run_ranks(boost, 1, [(name, nine), (name, boosted(tmp_path, name, "runs/base", **made, epochs=5))])
    later = {**made, "start_from": "run:base"}
    jobs = [
        boosted(tmp_path, name, "later", **later, epochs=4),
        boosted(tmp_path, name, "part", **later, epochs=3),
        boosted(tmp_path, name, "part", **later, epochs=4, attempt=2),
        boosted(tmp_path, name, "other", **later, epochs=4),
    ]
    for job in jobs:
        find_start("run:base", tmp_path, Storage(str(tmp_path)), file=library(name).model_files[0]).store(job.run_storage)
    jobs[-1].run_storage.write_bytes(START, trees_of_one_feature(name))
    whole, _, rest, refused = run_ranks(boost, 1, [(name, job) for job in jobs])[0]
    assert (whole.status, whole.state.step, rest.resumed_from_step, rest.state.step) == ("finished", 4, 3, 4)
    ends = [job_checkpoints(job).committed()[0].manifest.weights_digest for job in (nine, jobs[0], jobs[2])]
    assert ends[0] == ends[1] == ends[2], "on the same rows five rounds and four are nine"
    assert "train.start_from: the trees of run:base split at ['x'], and the rows have" in refused


def without_names(name: str, content: bytes) -> bytes:
    """The same trees, as a program without penstock would write them."""
    if name == "xgboost":
        import xgboost

        booster = xgboost.Booster(model_file=bytearray(content))
        booster.set_attr(penstock_classes=None)
        return bytes(booster.save_raw("ubj"))
    import lightgbm

    return lightgbm.Booster(model_str=content.decode()).model_to_string().encode()


@pytest.mark.parametrize("name", LIBRARIES)
def test_trees_of_other_classes_are_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def grown(run: str, classes: tuple[str, ...] | None, content: bytes | None = None, **spec: Any) -> bytes:
        job = boosted(tmp_path, name, run, workers=1, epochs=1, params=SETTINGS[name][0], **spec)
        schema = job.manifest.feed_schema.model_copy(update={"classes": classes})
        if content is not None:
            job.run_storage.write_bytes(START, content)
        job = replace(job, manifest=job.manifest.model_copy(update={"feed_schema": schema}))
        run_boosted_rank(library(name), job, Group(0, 1, CPU), ListClient())
        return job_checkpoints(job).committed()[0].storage.read_bytes(library(name).model_files[0])

    digits = tuple(map(str, range(10)))
    base = grown("base", digits)
    assert library(name).forest(base).classes == digits
    later = {"content": base, "start_from": "model"}
    with pytest.raises(SpecError) as refused:
        grown("swapped", ("1", "0", *digits[2:]), **later)
    assert (
        f"the trees of model have the classes {[*digits]}, and those of the label are ['1', '0', '2'" in refused.value.message
    )
    with pytest.raises(SpecError, match="those of the label are not named"):
        grown("numbers", None, **later)
    assert library(name).forest(grown("same", digits, **later)).rounds == 2 and "classes" not in capsys.readouterr().out
    grown("other tool", digits, without_names(name, base), start_from="model")
    assert f"the trees of model do not name their classes: taken to be {[*digits]}" in capsys.readouterr().out


@pytest.mark.parametrize("name", LIBRARIES)
def test_patience_ends_training_with_best_round_kept(tmp_path: Path, name: str) -> None:
    rate = {"eta" if name == "xgboost" else "learning_rate": 0.9, "early_stopping_rounds": 3}
    one = {"workers": 1, "epochs": 60}
    checkpoint = {"every_s": None, "best": BEST}
    patient = boosted(tmp_path, name, "patient", **one, params=rate, checkpoint=checkpoint)
    client = ListClient()
    ended = run_boosted_rank(library(name), patient, Group(0, 1, CPU), client)
    assert (ended.status, ended.state.step < 60) == ("finished", True)
    losses = [event.values["val/loss"] for event in client.events if isinstance(event, Point)]
    best = int(np.argmin(losses)) + 1
    assert len(losses) == ended.state.step == best + 3, "three rounds after the best one"
    store = job_checkpoints(patient)
    kept = store.best()
    assert kept is not None and kept.manifest.step == best
    assert [item.manifest.step for item in store.committed()] == [best + 3, best]
    found = evaluate(patient, load_model(model_spec(name, patient), kept.storage), splits=["validation"])
    assert found.metrics["val/loss"] == pytest.approx(min(losses), rel=1e-4)
    for epochs, attempt in ((best + 1, 1), (60, 2)):  # the first ends while patience counts
        made = {**one, "epochs": epochs, "attempt": attempt, "params": rate, "checkpoint": checkpoint}
        continued = boosted(tmp_path, name, "continued", **made)
        rest = run_boosted_rank(library(name), continued, Group(0, 1, CPU), ListClient())
    assert (rest.resumed_from_step, rest.state.step, rest.exactness) == (best + 1, best + 3, "bit-exact")
    digests = [[item.manifest.weights_digest for item in job_checkpoints(job).committed()] for job in (patient, continued)]
    assert digests[0] == [digests[1][0], digests[1][-1]], "the newest, and the best"


def test_fewer_rows_than_workers_are_refused(tmp_path: Path) -> None:
    job = boosted(tmp_path, "xgboost", "few")
    few = replace(job, manifest=job.manifest.model_copy(update={"rows": {**job.manifest.rows, "validation": 1}}))
    found = run_ranks(boost, 2, [("xgboost", few)])[0]
    assert "the validation split holds 1 row, and each of 2 workers needs one" in str(found)


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("lightgbm", {"max_iter": 9}, "train.params.max_iter: train.epochs is the number of rounds"),
        ("lightgbm", {"random_seed": 1}, "train.params.random_seed: shuffle.seed is the seed"),
        ("lightgbm", {"early_stopping_round": 3}, "train.params.early_stopping_round: write early_stopping_rounds"),
        ("lightgbm", {"loss": "l1", "app": "l1"}, "train.params.loss: objective is given twice"),
        ("lightgbm", {"config_file": "a"}, "train.params.config_file: only lightgbm's own command reads it; take it out"),
        ("lightgbm", {"tree": "voting"}, "train.params.tree: penstock connects the workers, each with its rows; take it out"),
        ("lightgbm", {"boost": "rf"}, "train.params.boost is 'rf'; it can be gbdt or gbrt or dart or goss"),
        ("lightgbm", {"deterministic": "false"}, "train.params.deterministic is 'false'; it can be True"),
        ("lightgbm", {"boost": "dart"}, "train.checkpoint.best: DART changes the trees of earlier rounds"),
        ("xgboost", {"booster": "dart"}, "train.checkpoint.best: DART changes the trees of earlier rounds"),
        ("xgboost", {"seed_per_iteration": False}, "train.params.seed_per_iteration is False; it can be True"),
        ("xgboost", {"tree_method": "exact"}, "train.params.tree_method is 'exact'; it can be hist or auto"),
    ],
)
def test_any_name_of_a_param_is_checked(name: str, params: dict[str, Any], says: str) -> None:
    spec = TrainSpec.model_validate({"framework": name, "epochs": 5, "params": params, "checkpoint": {"best": BEST}})
    with pytest.raises(SpecError) as raised:
        FRAMEWORKS.get(name).check(NO_CODE, spec)
    assert says in " ".join((raised.value.message, *raised.value.problems))


def test_lightgbm_objective_by_other_name_is_trained() -> None:
    schema = FeedSchema(columns=(ColumnInfo(name="y", dtype="float32"),), label="y")
    settings = library("lightgbm").settings(Task(schema, {"application": "quantile", "alpha": 0.9}, 7, 1))
    assert settings["objective"] == "quantile" and "application" not in settings


DRAWN = {
    "xgboost": [
        *({"subsample": 0.7, f"colsample_by{each}": 0.5} for each in ("tree", "level", "node")),
        *({"booster": "dart", "rate_drop": 0.4, **more} for more in ({}, {"skip_drop": 0.5}, {"subsample": 0.7})),
        {"subsample": 0.6, "num_parallel_tree": 2},
        {"subsample": 0.5, "sampling_method": "gradient_based"},
        {"base_score": 0.4},
    ],
    "lightgbm": [
        {"min_gain_to_split": 3, "learning_rate": 0.5},  # trees without a split
        {"feature_fraction": 0.6},
        {"feature_fraction_bynode": 0.6, "extra_trees": True},
        {"linear_tree": True},
        {"bagging_fraction": 0.5},  # needs bagging_freq
    ],
}
NOT_KEPT: list[dict[str, Any]] = [
    {"use_quantized_grad": True},
    {"cegb_penalty_feature_lazy": [0.1, 0.1]},
    {"sub_row": 0.5, "bagging_freq": 1},
    {"boosting": "goss"},
    {"data_sample_strategy": "goss"},
    {"boosting": "dart"},
]


@pytest.mark.parametrize(("name", "params"), [(name, params) for name, each in DRAWN.items() for params in each])
def test_killed_and_continued_trees_equal_the_whole(name: str, params: dict[str, Any]) -> None:
    """With validation, as most runs have, and from a checkpoint at every third round."""
    columns = tuple(ColumnInfo(name=each, dtype="float32") for each in ("x", "y", "label"))
    least = {"min_data_in_leaf": 5} if name == "lightgbm" else {}
    task = Task(FeedSchema(columns=columns, label="label", num_classes=3), {**params, **least}, 7, 1)
    rows: Any = Rows(3)

    def grown(content: bytes | None, first: int, last: int) -> bytes:
        trees = library(name).trees(task, rows, rows, content, {})
        for number in range(first, last):
            trees.grow(number)
        return trees.content(last)

    assert library(name).not_repeatable(params) is None
    continued = None
    for first in range(0, 12, 3):
        continued = grown(continued, first, first + 3)
    assert continued == grown(None, 0, 12)


@pytest.mark.parametrize("params", NOT_KEPT)
def test_lightgbm_says_that_it_does_not_continue_exactly(params: dict[str, Any]) -> None:
    assert library("lightgbm").not_repeatable(params) is not None


def test_lightgbm_state_not_restored_is_not_bit_exact(tmp_path: Path) -> None:
    made = {"params": {"bagging_fraction": 0.5, "bagging_freq": 1}, "workers": 1}
    for epochs, attempt in ((3, 1), (5, 2)):
        job = boosted(tmp_path, "lightgbm", "bagged", **made, epochs=epochs, attempt=attempt)
        ended = run_boosted_rank(library("lightgbm"), job, Group(0, 1, CPU), ListClient())
    assert ended.exactness == "same-order: lightgbm does not keep the state of bagging_fraction"


@pytest.mark.parametrize("name", LIBRARIES)
def test_unfit_params_are_refused_before_start(tmp_path: Path, name: str) -> None:
    framework = FRAMEWORKS.get(name)
    params = {"n_estimators": 5, "early_stopping_rounds": 3}
    spec: dict[str, Any] = {"framework": name, "learning_rate": 0.1, "recipe": "loss.py:focal", "params": params}
    with pytest.raises(SpecError) as raised:
        framework.check(NO_CODE, TrainSpec(**spec))
    said = " ".join(raised.value.problems)
    assert "train.params.n_estimators: train.epochs is the number of rounds" in said
    assert f"train.learning_rate: {name} does not read it" in said and "train.recipe: trees need no code" in said
    assert "train.epochs is missing" in said and "early_stopping_rounds needs checkpoint.best" in said

    def tried(**params: Any) -> None:
        job = boosted(tmp_path, name, "run", params=params, workers=1)
        framework.check(NO_CODE, job.spec)
        framework.try_rank(job, Group(0, 1, CPU), ListClient())

    with pytest.raises(SpecError, match="one of 10 classes"):
        tried(objective="binary:logistic" if name == "xgboost" else "binary")
    with pytest.raises(TrainingError, match=f"{name} refuses"):
        tried(max_depth="deep")
    with pytest.raises(SpecError) as raised:
        tried(max_dpeth=3, subsample=0.5, quite_another=1)
    unused = "is not used"
    assert raised.value.problems == (
        f"train.params.max_dpeth {unused}; did you mean 'max_depth'?",
        f"train.params.quite_another {unused}",
    )


class Rows:
    """Two hundred rows of a `ShardTable`."""

    names = ("x", "y")

    def __init__(self, num_classes: int | None) -> None:
        self.features = np.random.default_rng(3).standard_normal((200, 2), dtype=np.float32)
        score = self.features[:, 0] * 2
        self.labels = score if num_classes is None else np.digitize(score, np.linspace(-1, 1, num_classes - 1))

    def batches(self) -> Iterator[tuple[Any, Any]]:
        yield self.features, self.labels.astype(np.float32)


def test_unused_xgboost_params_match_its_own_warning() -> None:
    import xgboost

    values: dict[str, Any] = {
        **dict.fromkeys(("eta", "learning_rate", "subsample", "colsample_bylevel", "scale_pos_weight", "base_score"), 0.5),
        **dict.fromkeys(("gamma", "min_split_loss", "max_delta_step", "lambda", "reg_alpha", "max_leaves"), 0),
        **dict.fromkeys(("min_child_weight", "max_depth", "num_parallel_tree", "refresh_leaf", "max_cat_to_onehot"), 1),
        "verbosity": 1,  # of the process: 0 would silence what is asked for here
        **dict.fromkeys(("rate_drop", "one_drop", "skip_drop", "huber_slope", "tweedie_variance_power", "top_k", "eta0"), 1),
        **{
            "sampling_method": "uniform",
            "grow_policy": "lossguide",
            "process_type": "default",
            "multi_strategy": "one_output_per_tree",
        },
        **{"monotone_constraints": "(1,0)", "interaction_constraints": "[[0]]", "max_bin": 16, "max_cached_hist_node": 9},
        **{"sample_type": "uniform", "normalize_type": "tree", "feature_selector": "cyclic", "use_rmm": False},
    }
    columns = tuple(ColumnInfo(name=name, dtype="float32") for name in ("x", "y", "label"))
    schema = FeedSchema(columns=columns, label="label", num_classes=2)
    rows: Any = Rows(2)
    plain = xgboost.DMatrix(rows.features, rows.labels)
    for name, booster in itertools.product(values, ("gbtree", "dart")):
        params = {name: values[name], "booster": booster}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            xgboost.Booster({**params, "objective": "binary:logistic", "tree_method": "hist"}, [plain]).save_config()
        unused = any("are not used" in str(warning.message) for warning in said)
        with pytest.raises(SpecError, match=name) if unused else contextlib.nullcontext():
            library("xgboost").trees(Task(schema, params, 7, 1), rows, None, None, {})


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("num_classes", [2, 3, None])
def test_predictions_of_training_are_those_of_saved_trees(name: str, num_classes: int | None) -> None:
    columns = tuple(ColumnInfo(name=each, dtype="float32") for each in ("x", "y", "label"))
    task = Task(FeedSchema(columns=columns, label="label", num_classes=num_classes), {}, 7, 1)
    rows: Any = Rows(num_classes)
    trees = library(name).trees(task, rows, None, None, {})
    for number in range(5):
        trees.grow(number)
    predicted = library(name).forest(trees.content(5)).predict(rows.features)
    assert np.allclose(trees.predictions("train"), predicted, rtol=1e-4) and np.ptp(predicted) > 0.1


def test_columns_become_named_features_and_lists_are_refused() -> None:
    columns = (
        ColumnInfo(name="age [years]", dtype="int64"),
        ColumnInfo(name="pixels", dtype="uint8", shape=(2, 2)),
        ColumnInfo(name="label", dtype="int64"),
    )
    table = FeatureTable(FeedSchema(columns=columns, label="label", num_classes=2))
    assert table.names == ["age__years_", "pixels_0", "pixels_1", "pixels_2", "pixels_3"]
    pixels = torch.arange(8, dtype=torch.uint8).reshape(2, 2, 2)
    matrix = table.matrix({"age [years]": torch.tensor([40, 50]), "pixels": pixels, "label": torch.tensor([0, 1])})
    assert matrix.tolist() == [[40, 0, 1, 2, 3], [50, 4, 5, 6, 7]] and matrix.dtype == np.float32
    assert table.by_column([1.0, 1.0, 2.0, 0.0, 0.0]) == {"pixels": 0.75, "age [years]": 0.25}
    ragged = columns[1].model_copy(update={"shape": (), "ragged": "packed"})
    with pytest.raises(SpecError, match="the rows of pixels differ"):
        FeatureTable(FeedSchema(columns=(ragged, columns[2]), label="label", num_classes=2))
    with pytest.raises(SpecError, match="trees learn one label"):
        FeatureTable(FeedSchema(columns=columns, label="pixels"))


def test_missing_library_is_named_and_none_is_imported_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "boosted_trees.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    absent: Plugins[Any] = Plugins("training framework", "penstock.test_frameworks", {"boosted": "boosted_trees:TREES"})
    with pytest.raises(PreflightError, match="the training framework 'boosted' needs no_such_library, which is not") as raised:
        absent.get("boosted")
    assert raised.value.next_step == 'pip install "penstock[boosted]"'
    script = (
        "import sys; from penstock.training.frameworks.registry import FRAMEWORKS; import penstock.training.on_ray.worker;"
        "import penstock.flows.cli, penstock.flows.pipeline; FRAMEWORKS.get('torch').libraries;"
        "theirs = {'xgboost', 'lightgbm', 'lightning', 'pytorch_lightning', 'keras', 'tensorflow', 'transformers'};"
        "print(theirs & sys.modules.keys());"
        "from penstock.training.evaluation.defined import metric_library; metric_library();"
        "print(theirs & sys.modules.keys() - {'transformers'}); FRAMEWORKS.get('lightgbm');"
        "print(theirs & sys.modules.keys() - {'transformers'})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["set()", "set()", "{'lightgbm'}"]


def model_spec(name: str, job: TrainJob) -> ModelSpec:
    loader = FRAMEWORKS.get(name).loader
    return ModelSpec(code=job.code, params=job.spec.params, feed_schema=job.manifest.feed_schema, loader=loader)


def test_boosted_trees_of_a_csv_train_twenty_rounds(tmp_path: Path) -> None:
    framework = FRAMEWORKS.get("xgboost")
    features, target = load_breast_cancer(return_X_y=True)
    table = pa.table({**{f"f{number}": column for number, column in enumerate(features.T)}, "target": target})
    prepared = prepare(tmp_path, {"train": table}, label="target", validation={"fraction": 0.3})
    assert sum(prepared.manifest.rows.values()) == 569
    section = {"framework": "xgboost", "epochs": 20, "params": {"objective": "binary:logistic"}}
    spec = TrainSpec.model_validate(section)
    job = replace(prepared.job("ingest_programs.py:quickstart"), spec=spec, code=NO_CODE)
    measured = spec.model_copy(update={"params": {**spec.params, "eval_metric": ["logloss", "error"]}})
    with pytest.raises(SpecError, match=r"eval_metric.*evaluate\.metrics name the metrics"):
        framework.check(NO_CODE, measured)
    framework.check(NO_CODE, spec)
    ended = run_boosted_rank(library("xgboost"), job, Group(0, 1, CPU), ListClient())
    assert (ended.status, ended.state.step) == ("finished", 20)
    losses, right = reports(job, "val/loss"), reports(job, "val/accuracy")
    assert len(losses) == len(right) == 20 and losses[-1] < losses[0] and right[-1] > 0.9
