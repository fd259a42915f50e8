"""What does `run` say before a server is there: of a pipeline that cannot run, and of a signal?"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import DataError, Interrupted, PreflightError, SpecError
from penstock.flows.preflight.checks import Preflight
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs import run
from penstock.flows.verbs.check import check_pipeline
from penstock.flows.verbs.init import create_project
from penstock.flows.verbs.plan import plan_pipeline
from penstock.machine.stopping import StopRequest
from tests import ROOT
from tests.drills.project import make_project


def test_signal_outside_training_prints_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    stopping, said, deadline = StopRequest(), "", time.monotonic() + 120
    with pytest.raises(Interrupted), run.raise_interrupted_on_stop(stopping):
        stopping.received.append(signal.SIGINT)
        stopping.stop.set()
        while not said and time.monotonic() < deadline:
            said = capsys.readouterr().err
            time.sleep(0.01)
        raise RuntimeError("what Prefect makes of it")
    assert said == "  stopping: work that has started ends first\n"


def test_graceful_stop_prints_no_second_line(capsys: pytest.CaptureFixture[str]) -> None:
    stopping = StopRequest()
    stopping.graceful = True
    stopping.received.append(signal.SIGINT)
    run._announce_stop(stopping, threading.Event())
    assert not capsys.readouterr().err


STEPS = [
    {"standard_scaler": {"columns": ["mean_radius", "mean_txture"]}},
    {"rename": {"mean_area": "area"}},
    {"one_hot": {"columns": ["mean_area"]}},
    {"min_max_scaler": {"columns": ["area", "diagnosis"]}},
    {"concatenator": {"columns": ["area", "mean_radius"]}},
    {"drop": ["mean_radius", "features"]},
    {"cast": {"mean_texture": "float32", "mean_textur": "float32"}},
]


def test_missing_columns_are_refused_together_before_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    create_project(tmp_path / "p", "tabular")
    file = tmp_path / "p" / "pipeline.yaml"
    slices = "evaluate.slices=[diagnosis, {mean_ara: [500]}]"
    overrides = [f"preprocess={json.dumps(STEPS)}", "data.types={mean_sth: int8}", slices]
    with pytest.raises(SpecError) as refused:
        run.run(file, overrides)
    assert refused.value.problems == (
        "data.types.mean_sth: no file has a column 'mean_sth'; did you mean 'mean_smoothness'?",
        "preprocess[0].standard_scaler: there is no column 'mean_txture' at this point; did you mean 'mean_texture'?",
        "preprocess[2].one_hot: there is no column 'mean_area' at this point; did you mean 'mean_radius'?",
        "preprocess[3].min_max_scaler: it cannot take column 'diagnosis' of text: cast it first (cast: {diagnosis: float64}), "
        "or use one_hot or ordinal for categories",
        "preprocess[5].drop: there is no column 'mean_radius' at this point; did you mean 'worst_radius'?",
        "preprocess[6].cast: there is no column 'mean_textur' at this point; did you mean 'mean_texture'?",
        "evaluate.slices: there is no column 'mean_ara'; did you mean 'mean_area'?",
    )
    assert not capsys.readouterr().err and not (tmp_path / "p" / ".penstock").exists()
    with pytest.raises(SpecError) as checked:
        check_pipeline(load_spec(file, overrides), lambda _line: None)
    assert checked.value.problems == refused.value.problems


def test_missing_files_and_columns_are_reported_together(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=2)
    wrong = ["data.train=data/trian/", "data.validation=held.parquet", "train.recipe=modle.py:Net"]
    wrong += ["preprocess=[{drop: [maen]}, {map_batches: 'transfroms.py:scale'}]", "train.callbacks=['calls.py:Count']"]
    folder = file.parent
    sources = [f"data.train: {folder}/data/trian matches no file", f"data.validation: {folder}/held.parquet matches no file"]
    code = [
        f"modle.py:Net: there is no file modle.py in {folder}; did you mean 'model.py'?",
        f"transfroms.py:scale: there is no file transfroms.py in {folder}; did you mean 'transforms.py'?",
        f"calls.py:Count: there is no file calls.py in {folder}; did you mean 'model.py'?",
    ]
    column = "preprocess[0].drop: there is no column 'maen' at this point; did you mean 'mean'?"
    refusing: list[Callable[[list[str]], object]] = [
        lambda overrides: run.run(file, overrides),
        lambda overrides: check_pipeline(load_spec(file, overrides), lambda _line: None),
        lambda overrides: plan_pipeline(load_spec(file, overrides)),
    ]
    for refuses in refusing:
        with pytest.raises(SpecError) as refused:
            refuses(wrong)
        assert list(refused.value.problems) == [*sources, *code]
        with pytest.raises(SpecError) as refused:
            refuses(wrong[2:])
        assert list(refused.value.problems) == [*code, column]
        with pytest.raises(DataError) as rows_only:
            refuses(wrong[:2])
        assert list(rows_only.value.problems) == sources
        assert rows_only.value.next_step.count("relative paths start at the pipeline file") == 1
    assert pickle.loads(pickle.dumps(rows_only.value)).parts[0].message == sources[0]


def test_unread_columns_differ_from_missing_ones(tmp_path: Path) -> None:
    create_project(tmp_path / "p", "tabular")
    columns = "data.columns=[mean_radius, mean_aera, diagnosis]"
    steps = "preprocess=[{drop: [mean_texture]}, {label_encoder: {column: diagnosis}}]"
    with pytest.raises(SpecError) as refused:
        run.run(tmp_path / "p", [columns, steps, "evaluate.slices=[mean_texture]"])
    assert refused.value.problems == (
        "data.columns[1]: no file has a column 'mean_aera'; did you mean 'mean_area'?",
        "preprocess[0].drop: column 'mean_texture' is not among data.columns",
        "evaluate.slices: column 'mean_texture' is not among data.columns",
    )
    assert refused.value.next_step.startswith("the rows have: mean_radius, mean_texture, mean_perimeter, ")
    assert refused.value.next_step.endswith(", ... and 11 more")


@pytest.mark.parametrize(
    ("override", "kind", "words"),
    [
        ("data.label=nothing", SpecError, "data.label: no file has a column 'nothing'"),
        ("preprocess=[{drop: [label]}]", SpecError, "data.label: there is no column 'label' after the transforms"),
        ("train.start_from=none.pt", SpecError, "train.start_from: 'none.pt' is not a file of weights in"),
        ("train.start_from=run:none", SpecError, "train.start_from: 'run:none' is not a run with a torch model in"),
        ("train.workers=64", PreflightError, "train.workers: 64 with train.cpus_per_worker: 0.5 needs 32"),
        ("storage=/proc/nothing", PreflightError, "storage /proc/nothing cannot be written"),
    ],
)
def test_check_failure_is_refused_before_servers(
    tmp_path: Path,
    override: str,
    kind: type[SpecError],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = make_project(tmp_path / "p", files=2)
    with pytest.raises(kind) as refused:
        run.run(file, ["preprocess=[]", override])
    assert words in str(refused.value)
    assert "starting" not in capsys.readouterr().err and not (file.parent / ".penstock").exists()


BEFORE_LIBRARIES = """
import sys
from pathlib import Path
from penstock.flows import cli

try:
    cli._read_spec(Path(sys.argv[1]), ["train.start_from=a.pt"])
finally:
    print("torch" in sys.modules)
"""


def test_missing_start_weights_refused_before_torch_loads(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=2)
    told = subprocess.run([sys.executable, "-c", BEFORE_LIBRARIES, str(file)], capture_output=True, text=True, cwd=ROOT)
    assert told.stdout == "False\n" and "SpecError: train.start_from: 'a.pt' is not a file of weights" in told.stderr
    file.write_text(file.read_text().replace("  recipe:", "  start_from: a.pt\n  recipe:"))
    assert load_spec(file).spec.train.start_from == "a.pt", "clean frees the space of such a pipeline, too"


def test_column_of_another_file_passes_preflight(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=2)
    steps = "preprocess=[transforms.py:scale, {drop: [made]}]".replace(
        "transforms.py:scale", "{map_batches: 'transforms.py:scale'}"
    )
    for overrides in ([steps], ["data.missing_columns=null", "data.types={later: int64}"]):
        Preflight(load_spec(file, overrides)).ahead()
