"""A fault at the n-th call that leaves the process: a run ends done, or with an error of ours after which the command goes on.

The weights are the same either way. All runs are in this process (without_servers.py), so that many are cheap. Prefect and Ray
are left out, as other drills kill those.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED, TEMPORARILY_UNAVAILABLE
from mlflow.tracking import MlflowClient

from penstock.errors import DataError, LeaseHeldError, PenstockError, ServiceError
from penstock.flows.predict import flow as predict_flow
from penstock.flows.predict.request import PredictRequest
from penstock.flows.retention.clean import clean_pipeline
from penstock.flows.spec_file import load_spec
from penstock.storage import Storage
from penstock.tasks.records.at_work import choosing_a_run
from penstock.training.predict.output import PredictedUnit
from penstock.training.predict.unit import Scorer, ScoringJob, packed_model
from tests.drills.project import DAY
from tests.drills.without_servers import leave_out_servers, run_here
from tests.training.predict.test_score import made_model, people
from tests.training.registry.test_raw_rows import table_source

pytestmark = pytest.mark.drill

STORE_STRIDE, SOURCE_STRIDE, TRACKER_STRIDE, SCORE_STRIDE, CLEAN_STRIDE = 29, 7, 17, 5, 11
"""Every so many calls are tried, the day decides which: all of them, which 1 does, take 20 minutes and more. In twice the
stride's days each call is tried both before and after its effect."""

PIPELINE = """\
name: p
data: {{format: csv, train: rows/, validation: {{fraction: 0.2}}, label: y}}
preprocess: [{{standard_scaler: {{columns: [a]}}}}]
materialize: {{unit_bytes: 1}}
train: {{recipe: "model.py:Net", epochs: 2, batch_rows: 16, checkpoint: {{every_steps: 2, keep: 1}}}}
storage: {storage}
"""

MODEL = """\
import torch


class Net:
    def build_model(self, schema):
        return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(self.predict(model, batch), batch["y"])

    def predict(self, model, batch):
        return model(batch["a"].float()[:, None])
"""


class Faults:
    """Counts calls and fails one of them.

    Attributes:
        at: number of the call that fails, from 1; 0 for none.
        after: it fails once the call has had its effect: the answer is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.arm(0)

    def arm(self, at: int, *, after: bool = False, error: Callable[[], Exception] = lambda: ConnectionError("cut")) -> None:
        """Count from the start again."""
        self.at, self.after, self.error, self.calls = at, after, error, 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around one call."""
        with self._lock:
            self.calls += 1
            fails = self.calls == self.at
        if fails and not self.after:
            raise self.error()
        yield
        if fails:
            raise self.error()


class Projects:
    """Projects with equal rows, and runs of them."""

    def __init__(self, folder: Path, faults: Faults, overrides: Sequence[str] = ()) -> None:
        self._folder, self._faults, self._overrides, self._made = folder, faults, overrides, 0

    def project(self) -> Path:
        """A new project with equal rows."""
        self._made += 1
        folder = self._folder / f"p{self._made}"
        (folder / "rows").mkdir(parents=True)
        for part in range(2):
            rows = [f"{row % 7},{row % 2}" for row in range(part, part + 40)]
            (folder / "rows" / f"{part}.csv").write_text("\n".join(["a,y", *rows]) + "\n")
        (folder / "model.py").write_text(MODEL)
        text = PIPELINE.format(storage=f"memory://nth-call{folder}")
        (folder / "pipeline.yaml").write_text(text)
        return folder / "pipeline.yaml"

    def faulty(self, at: int, **how: Any) -> tuple[dict[str, Any], PenstockError | None, int]:
        """Run with a fault, and where that ends the attempt, run again: (result, what ended the first, its calls)."""
        file, ended = self.project(), None
        self._faults.arm(at, **how)
        try:
            result = run_here(file, self._overrides)
        except PenstockError as error:
            ended = error
        calls = self._faults.calls
        self._faults.arm(0)
        if ended is not None:
            result = run_here(file, self._overrides)
        return result, ended, calls


def tried(calls: int, stride: int) -> list[tuple[int, bool]]:
    """Calls to fail today, and whether after their effect. The first is always one, before it: nothing can be done without."""
    rounds, offset = divmod(DAY, stride)
    today = [(number, (rounds + turn) % 2 == 1) for turn, number in enumerate(range(offset + 1, calls + 1, stride))]
    return list(dict.fromkeys([(1, False), *today]))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    print(f"PENSTOCK_DRILL_DAY={DAY} tries the same calls on another day")
    leave_out_servers(monkeypatch)
    return Faults()


@pytest.fixture
def store_faults(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Faults of the calls to a store that is not a local folder."""
    original = Storage._translated

    @contextlib.contextmanager
    def translated(self: Storage, path: str) -> Iterator[None]:
        with original(self, path), contextlib.nullcontext() if self.is_local else faults.call():
            yield

    monkeypatch.setattr(Storage, "_translated", translated)
    return faults


def test_in_twice_the_strides_days_each_call_is_tried_before_and_after_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, bool]] = set()
    for day in range(739_000, 739_000 + 2 * TRACKER_STRIDE):
        monkeypatch.setattr(sys.modules[__name__], "DAY", day)
        seen.update(tried(60, TRACKER_STRIDE))
    assert seen == {(number, after) for number in range(1, 61) for after in (False, True)}


def test_a_cut_connection_to_the_store_costs_an_attempt_at_most(tmp_path: Path, store_faults: Faults) -> None:
    runs = Projects(tmp_path, store_faults)
    calm, _, calls = runs.faulty(0)
    assert calls > 100
    ended = [_same_end(runs, calm, number, after=after) for number, after in tried(calls, STORE_STRIDE)]
    assert ended[0], "it cannot be done without"


class SourceFile(BytesIO):
    """A file of a source. Each read of it may fail."""

    def __init__(self, content: bytes, faults: Faults) -> None:
        super().__init__(content)
        self._faults = faults

    def read(self, *given: Any) -> bytes:
        with self._faults.call():
            return super().read(*given)


def test_a_cut_connection_to_the_store_of_the_source_is_no_fault_of_the_data_and_costs_an_attempt_at_most(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Projects(tmp_path, faults, ["data.train=memory://source/"])
    for part in (runs.project().parent / "rows").iterdir():
        MemoryFileSystem().pipe_file(f"/source/{part.name}", part.read_bytes())
    for name in ("find", "info", "open"):
        call = getattr(MemoryFileSystem, name)

        def failing(self: MemoryFileSystem, path: str, *given: Any, call: Any = call, **named: Any) -> Any:
            if "/source" not in path:
                return call(self, path, *given, **named)
            with faults.call():
                found = call(self, path, *given, **named)
                return SourceFile(found.getvalue(), faults) if call.__name__ == "open" else found

        monkeypatch.setattr(MemoryFileSystem, name, failing)
    calm, _, calls = runs.faulty(0)
    assert calls > 10
    for number, after in tried(calls, SOURCE_STRIDE):
        result, error, _ = runs.faulty(number, after=after)
        assert error is None or isinstance(error, ServiceError), (number, after, error)
        assert result["weights_digest"] == calm["weights_digest"], (number, after)


def test_a_cut_connection_to_the_output_of_predictions_costs_an_attempt_at_most(
    tmp_path: Path, store_faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow of predictions and what its driver writes are real; the model scores in this process."""
    model = made_model(tmp_path, table_source)

    def here(*given: Any) -> Iterator[PredictedUnit | DataError]:
        jobs: Sequence[ScoringJob] = given[-1]
        return map(Scorer(packed_model(model)), jobs)

    monkeypatch.setattr(predict_flow, "_on_ray", here)
    (tmp_path / "in").mkdir()
    for part in range(3):
        pq.write_table(people(10 * part, 10), tmp_path / "in" / f"{part}.parquet")

    def predict(name: str) -> dict[str, Any]:
        request = PredictRequest(
            model=str(model), input=str(tmp_path / "in"), output=f"memory://nth-call{tmp_path}/{name}", state_dir=str(tmp_path)
        )
        state = predict_flow.predict.fn(request)
        return {"data_digest": state.data["data_digest"], "rows": state.data["total_rows"], "files": _scored(request.output)}

    store_faults.arm(0)
    calm = predict("calm")
    calls, ended = store_faults.calls, list[bool]()
    assert calls > 10 and calm["rows"] == 30
    for number, after in tried(calls, SCORE_STRIDE):
        store_faults.arm(number, after=after)
        try:
            found = predict(f"{number}")
            ended.append(False)
        except PenstockError:
            store_faults.arm(0)
            found = predict(f"{number}")
            ended.append(True)
        assert found == calm, (number, after)
    assert ended[0], "it cannot be done without"


def test_a_tracking_server_that_is_away_or_refuses_once_costs_an_attempt_at_most(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            with faults.call():
                return call(*args, **named)

        return wrapped

    for name, call in list(vars(MlflowClient).items()):
        if callable(call) and not name.startswith("_"):
            monkeypatch.setattr(MlflowClient, name, failing(call))
    runs = Projects(tmp_path, faults)
    calm, _, calls = runs.faulty(0)
    assert calls > 30
    ended: dict[str, list[bool]] = {}
    for code, word in ((TEMPORARILY_UNAVAILABLE, "away"), (PERMISSION_DENIED, "refuses")):
        ended[word] = [
            _same_end(runs, calm, number, after=after, error=lambda: MlflowException(word, code))  # noqa: B023
            for number, after in tried(calls, TRACKER_STRIDE)
        ]
    assert not any(ended["away"]), "it is asked again"
    assert ended["refuses"][0]


def test_runs_beside_each_other_prepare_the_rows_once_and_end_as_they_do_alone(tmp_path: Path, faults: Faults) -> None:
    runs, ended = Projects(tmp_path, faults), dict[str, dict[str, Any]]()
    longer = ["train.epochs=3"]
    alone = [run_here(runs.project(), overrides) for overrides in ([], longer)]
    file = runs.project()
    storage = Storage(load_spec(file, []).spec.storage)

    def beside(stage: str) -> None:
        if stage in ("read", "train"):
            with pytest.raises(LeaseHeldError, match="is held by pid"):
                run_here(file)
        if stage == "materialize":
            ended["beside"] = run_here(file, longer)
            ended["units"] = storage.tree("units")

    first = run_here(file, meanwhile=beside)
    assert storage.tree("units") == ended["units"]
    both = (first, ended["beside"])
    assert [one["weights_digest"] for one in both] == [one["weights_digest"] for one in alone]
    assert len({one["run"] for one in both}) == 2 == len({one["model_uri"] for one in both})
    for one, overrides in zip(both, ([], longer), strict=True):  # each is found again; the alias is given to it once more
        again = run_here(file, overrides)
        assert (again["run"], {stage["outcome"] for stage in again["stages"][:-1]}) == (one["run"], {"reused"})
    with choosing_a_run(storage, "p"):
        assert storage.list("pipelines/p/leases") == []


def test_a_cut_connection_to_the_store_while_it_is_cleaned_loses_nothing_that_is_kept(
    tmp_path: Path, store_faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Projects(tmp_path, store_faults)
    file = runs.project()
    storage = Storage(load_spec(file, []).spec.storage)
    for rows in (4, 8, 16):  # the model of the second keeps an alias
        kept = run_here(file, [f"train.batch_rows={rows}"])
    before = dict(MemoryFileSystem.store)

    def clean() -> dict[str, Any]:
        freed = clean_pipeline(file, 1, None, dry_run=False, report=lambda _line: None)["freed"]
        return {"freed": len(freed), "left": [path for path in storage.tree("") if "lease" not in path]}

    store_faults.arm(0)
    calm = clean()
    calls, ended = store_faults.calls, list[bool]()
    assert calls > 20 and calm["freed"] > 0
    for number, after in tried(calls, CLEAN_STRIDE):
        MemoryFileSystem.store.clear()
        MemoryFileSystem.store.update(before)
        store_faults.arm(number, after=after)
        try:
            clean()
            ended.append(False)
        except PenstockError:
            ended.append(True)
        store_faults.arm(0)
        assert clean()["left"] == calm["left"], (number, after)
    assert ended[0], "it cannot be done without"
    again = run_here(file, ["train.batch_rows=16"])
    assert (again["run"], {stage["outcome"] for stage in again["stages"]}) == (kept["run"], {"reused"})


def _scored(output: str) -> list[dict[str, Any]]:
    """All rows of the output, by file and row."""
    storage = Storage(output)
    parts = [pq.read_table(pa.BufferReader(storage.read_bytes(path))) for path in storage.tree("") if path.endswith(".parquet")]
    return pa.concat_tables(parts).sort_by([("file", "ascending"), ("row", "ascending")]).to_pylist()


def _same_end(runs: Projects, calm: dict[str, Any], number: int, **how: Any) -> bool:
    """Run with that fault, compare the end, and return whether the first attempt was ended by it."""
    result, error, _ = runs.faulty(number, **how)
    same = ("status", "weights_digest", "metrics", "model_uri")
    assert [result[name] for name in same] == [calm[name] for name in same], (number, how, error)
    return error is not None
