"""What a loaded model says to rows: which it refuses, with which columns it answers, and that no row knows of the others."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import DataError
from penstock.training.registry.loaded_model import SHOWN_PROBLEMS, LoadedModel
from tests.training.predict.test_score import made_model, people
from tests.training.registry.test_raw_rows import table_source


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return LoadedModel(made_model(tmp_path_factory.mktemp("people"), table_source))


def test_a_bad_row_is_refused_with_row_column_value_and_rule_and_of_many_some_are_shown(model: LoadedModel) -> None:
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
    with pytest.raises(DataError, match="on_error is 'skip'"):
        model.predict(rows, on_error="skip")  # type: ignore[arg-type]


def test_columns_of_the_answer_and_of_the_rows_given_may_be_asked_for_in_any_order(model: LoadedModel) -> None:
    table = people(0, 6, note=[f"n{row}" for row in range(6)])
    for given in (table, table.to_pandas(), table.to_pylist()):
        answer = model.predict(given, columns=["note", "prediction", "id"])
        assert list(answer) == ["note", "prediction", "id"]
        assert answer["note"].tolist() == table["note"].to_pylist() and answer["id"].tolist() == table["id"].to_pylist()
        assert answer["prediction"].tolist() == model.predict(table)["prediction"].tolist()
    with pytest.raises(DataError, match=r"columns: there is no column 'predicton'; did you mean 'prediction'\?") as refused:
        model.predict(table, columns=["predicton"])
    assert refused.value.next_step == (
        "choose from prediction, probability, probabilities, id, age, height, town, weight, note"
    )


def test_a_row_is_answered_alone_as_it_is_among_others_and_beside_bad_ones(model: LoadedModel) -> None:
    rows = people(0, 40).to_pylist()
    together = model.predict(rows)
    spoilt = [{**row, "weight": None} if number % 2 else row for number, row in enumerate(rows)]
    beside = model.predict(spoilt, on_error="report")
    for number, row in enumerate(rows):
        alone = model.predict(row)
        for found in (together, beside) if number % 2 == 0 else (together,):
            assert found["prediction"][number] == alone["prediction"][0]
            # A batch of another size may round otherwise in the last bits.
            assert np.allclose(found["probabilities"][number], alone["probabilities"][0], rtol=0, atol=1e-6)
    assert len({str(each) for each in together["probabilities"].tolist()}) == 40, "else another row's answer would pass"
