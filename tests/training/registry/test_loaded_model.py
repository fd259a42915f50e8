"""What a loaded model says to rows: which it refuses, with which columns it answers, and that no row knows of the others."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from mlflow.utils.proto_json_utils import NumpyEncoder

from penstock.errors import CheckpointError, DataError
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage
from penstock.training.evaluation.evaluate import evaluate
from penstock.training.frameworks.ray_train.loading import LoopModel
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, load_model
from penstock.training.registry.given_rows import refuse_absent
from penstock.training.registry.loaded_model import MODEL_FILE, SHOWN_PROBLEMS, LoadedModel, answer_table
from penstock.training.registry.serving import ServedModel
from penstock.training.spec import TrainSpec
from tests.ingest.preparing import Source
from tests.training.predict.test_score import made_model, people
from tests.training.registry.test_raw_rows import Made, table_source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel(made_model(tmp_path_factory.mktemp("people"), table_source))


def test_predict_bad_rows_name_row_column_value_rule(model: LoadedModel) -> None:
    rows = people(0, 40).to_pylist()
    rows[3]["age"] = "old"
    with pytest.raises(DataError) as refused:
        model.predict(rows)
    assert refused.value.message == "row 3: column 'age' holds 'old', which does not read as int64"
    assert 'on_error="report"' in refused.value.next_step
    for row in rows[20:]:
        row["weight"] = None
    with pytest.raises(DataError, match="21 of 40 rows cannot be scored") as refused:
        model.predict(rows)
    assert refused.value.problems[1] == "row 20: column 'weight' holds null; the model needs a value there"
    assert refused.value.problems[SHOWN_PROBLEMS:] == ("and 11 more",)
    reported = model.predict(rows, on_error="report")
    assert reported["error"].isna().tolist() == [row != 3 for row in range(20)] + [False] * 20
    worst = [{**row, "age": "old"} for row in people(0, 3).to_pylist()]  # a column in which a null would be filled
    reported = model.predict(worst, on_error="report")
    assert reported["error"].str.contains("'old', which does not read as int64").all() and reported["prediction"].isna().all()
    scored = model.score(pa.Table.from_pylist(worst))
    assert (scored.table.num_rows, scored.rows.tolist(), list(scored.problems)) == (0, [], [0, 1, 2])
    with pytest.raises(DataError, match="on_error is 'skip'"):
        model.predict(rows, on_error="skip")  # type: ignore[arg-type]


def test_model_that_cannot_predict_names_the_missing_part(model: LoadedModel) -> None:
    mute = copy.copy(model)
    mute._model = LoopModel(None, None, "loop.py:f")
    with pytest.raises(DataError, match=r"cannot predict without a function load_model\(folder, config\)"):
        mute._answer(pa.table({}), 1)


def test_missing_columns_are_named_up_to_a_limit() -> None:
    schema = pa.schema([(f"c{number}", pa.int64()) for number in range(300)])
    with pytest.raises(DataError, match="no column 'c100', nor 'c101'") as refused:
        refuse_absent(schema.names[:100], schema, ())
    assert refused.value.message.endswith("; they have " + ", ".join(schema.names[:20]) + ", ... and 80 more")
    absent = ", ".join(f"{name} (int64)" for name in schema.names[100:120])
    assert refused.value.next_step == f"give what is missing as the source has it: {absent}, ... and 180 more"


def test_predict_row_does_not_depend_on_others(model: LoadedModel) -> None:
    rows = people(0, 40).to_pylist()
    together = model.predict(rows)
    spoilt = [{**row, "weight": None} if number % 2 else row for number, row in enumerate(rows)]
    beside = model.predict(spoilt, on_error="report")
    for number, row in enumerate(rows):
        alone = model.predict([row])
        for found in (together, beside) if number % 2 == 0 else (together,):
            assert found["prediction"][number] == alone["prediction"][0]
            # A batch of another size may round otherwise in the last bits.
            assert np.allclose(found["probabilities"][number], alone["probabilities"][0], rtol=0, atol=1e-6)
    assert len({str(each) for each in together["probabilities"].tolist()}) == 40, "else another row's answer would pass"


def prices_source(folder: Path) -> Source:
    """A label that is a number, of towns of which train lacks every third row's."""
    rng = np.random.default_rng(4)
    towns = [("Ulm", "Bonn", f"only {row}")[row % 3] for row in range(120)]
    table = pa.table({"town": towns, "area": rng.random(120), "price": rng.random(120).astype(np.float32)})
    steps = [{"one_hot": {"columns": ["town"]}}, {"standard_scaler": {"columns": ["area"]}}]
    return Source.of(folder, {"train/0.parquet": table}, steps, validation=None, test={"fraction": 0.4}, label="price")


def test_load_model_of_other_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / MODEL_FILE).write_text('{"version": 2}')
    with pytest.raises(CheckpointError, match=r"model\.json does not describe a model of this penstock: version: "):
        LoadedModel(tmp_path)


@pytest.mark.parametrize("source", [table_source, prices_source])
def test_predict_unseen_categories_equals_evaluate(tmp_path: Path, source: Callable[[Path], Source]) -> None:
    folder, made = made_model(tmp_path, source), Made(source(tmp_path / "source"))
    spec = ModelSpec.model_validate_json((folder / MODEL_FILE).read_text())
    job = TrainJob(
        run_storage=Storage(str(tmp_path / "run")),
        data_storage=made.source.storage,
        manifest=made.manifest,
        order=make_order(ShuffleSpec(), made.manifest.rows["train"]),
        spec=TrainSpec(recipe="net.py:Net", batch_rows=spec.batch_rows),
        seed=0,
        code=spec.code,
        attempt=1,
        pipeline="p",
    )
    seen = evaluate(job, load_model(spec, Storage(str(folder)))).rows["test"]
    assert any(town.startswith("only") for town in made.test["town"].to_pylist())
    answer = LoadedModel(folder).predict(made.test)
    assert len(answer) == len(seen["id"]) == made.test.num_rows > spec.batch_rows
    if source is prices_source:
        assert np.array_equal(answer["prediction"].to_numpy(np.float32), seen["predicted"])
        assert np.array_equal(np.abs(seen["predicted"] - made.test["price"].to_numpy()), seen["loss"])
        return
    classes = made.manifest.feed_schema.classes or ()
    assert answer["prediction"].tolist() == [classes[int(index)] for index in seen["predicted"]]
    of_truth = np.array(answer["probabilities"].tolist(), np.float32)[np.arange(len(answer)), seen["target"].astype(np.int64)]
    assert np.array_equal(-np.log(np.maximum(of_truth, 1e-12)), seen["loss"])


def test_places_that_are_all_nan_are_left_out_of_an_answer() -> None:
    boxes = torch.arange(12.0).reshape(2, 3, 2)
    boxes[0, 1] = boxes[1] = torch.nan
    boxes[0, 0, 1] = torch.nan
    schema = FeedSchema(columns=(ColumnInfo(name="boxes", dtype="float32", ragged="padded"),), label="boxes")
    given = answer_table(boxes, schema, "logits")["prediction"].to_pylist()
    assert repr(given) == "[[[0.0, nan], [4.0, 5.0]], []]"
    whole = answer_table(torch.ones(2, 3, 2), schema, "logits")["prediction"].to_pylist()
    assert whole == [[[1.0, 1.0]] * 3] * 2


def test_row_whose_scores_are_nan_has_no_class() -> None:
    schema = FeedSchema(columns=(ColumnInfo(name="y", dtype="int64"),), label="y", num_classes=2, classes=("well", "ill"))
    answer = answer_table(torch.tensor([[torch.nan, torch.nan], [0.0, 1.0]]), schema, "logits")
    assert answer["prediction"].to_pylist() == [None, "ill"]
    numbers = FeedSchema(columns=(ColumnInfo(name="y", dtype="float64"),), label="y")
    exact = torch.tensor([1700000037.0], dtype=torch.float64)
    assert answer_table(exact, numbers, "logits")["prediction"].to_pylist() == [1700000037.0]


@pytest.mark.parametrize("on_error", ["raise", "report"])
def test_nan_scores_leave_other_classes_integers_json_null(model: LoadedModel, on_error: str) -> None:
    odd, served = copy.copy(model), ServedModel()
    schema = FeedSchema(columns=(ColumnInfo(name="y", dtype="int64"),), label="y", num_classes=2)
    odd._answer = lambda *_: answer_table(torch.tensor([[0.0, 1.0], [torch.nan, 1.0]]).log(), schema, "logits")  # type: ignore[method-assign]
    assert odd.predict(people(0, 2))["prediction"].tolist() == [1, pd.NA]
    served.model = odd
    answer = served.predict(None, people(0, 2).to_pandas(), {"on_error": on_error}).drop(columns="error", errors="ignore")
    text = json.dumps(answer.to_dict(orient="records"), cls=NumpyEncoder, allow_nan=False)
    rows = [[1, 1.0, [0.0, 1.0]], [None, None, [None, None]]]
    assert json.loads(text) == [dict(zip(("prediction", "probability", "probabilities"), row, strict=True)) for row in rows]
    assert '"prediction": 1,' in text
