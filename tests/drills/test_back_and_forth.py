"""Settings and held-out rows go back and forth: what is trained once is never trained again, and plans say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient

from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.plan import plan_pipeline
from penstock.storage import Storage
from tests.drills.project import make_project
from tests.drills.without_servers import leave_out_servers, run_here

pytestmark = pytest.mark.drill

OTHER = ["train.batch_rows=128"]
TESTED = ["data.test=data/test.parquet"]
AFTER = {"train", "evaluate", "register"}


def stages(answer: dict[str, Any], word: str) -> dict[str, str]:
    return {stage["name"]: stage[word] for stage in answer["stages"]}


def test_what_was_trained_once_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_servers(monkeypatch)
    file = make_project(tmp_path / "p", epochs=2, files=2)
    part = pq.read_table(file.parent / "data" / "train" / "part-1.parquet")
    (file.parent / "data" / "train" / "part-1.parquet").unlink()
    test = file.parent / "data" / "test.parquet"
    pq.write_table(part, test)

    first = run_here(file, TESTED)
    other = run_here(file, [*TESTED, *OTHER])
    assert other["run"] != first["run"]
    planned = stages(plan_pipeline(load_spec(file, TESTED)), "action")
    assert planned.pop("register") == "run" and set(planned.values()) == {"reuse"}
    again = run_here(file, TESTED)
    outcomes = stages(again, "outcome")
    assert outcomes.pop("register") == "ran" and set(outcomes.values()) == {"reused"}
    assert (again["run"], again["model_uri"]) == (first["run"], first["model_uri"])
    # The same version as before, and it has the alias again.
    client = MlflowClient(f"sqlite:///{file.parent}/.penstock/mlflow/mlflow.db")
    assert again["model_uri"] == f"models:/drill/{client.get_model_version_by_alias('drill', 'candidate').version}"

    labels = part.column("label").to_numpy().copy()
    labels[0] = (labels[0] + 1) % 10
    pq.write_table(part.set_column(part.column_names.index("label"), "label", pa.array(labels)), test)
    planned = stages(plan_pipeline(load_spec(file, TESTED)), "action")
    assert {name for name, action in planned.items() if action == "depends"} == AFTER
    corrected = run_here(file, TESTED)
    assert {name: stages(corrected, "outcome")[name] for name in AFTER} == {
        "train": "reused", "evaluate": "ran", "register": "reused",
    }  # fmt: skip
    assert corrected["model_uri"] == first["model_uri"]

    run_here(file, [*TESTED, *OTHER, "data.validation=null"], until="materialize")
    elsewhere = run_here(file, [*TESTED, "data.train=./data/../data/train"])
    assert set(stages(elsewhere, "outcome").values()) == {"reused"}

    storage = Storage(load_spec(file, TESTED).spec.storage)
    storage.delete(f"runs/{first['run']}/checkpoints")
    again = run_here(file, TESTED)
    assert (again["run"], stages(again, "outcome")["train"]) == (first["run"], "ran"), "what is gone is trained again"
    assert again["weights_digest"] == first["weights_digest"] and again["model_uri"] == first["model_uri"]
    assert set(stages(run_here(file, TESTED), "outcome").values()) == {"reused"}
