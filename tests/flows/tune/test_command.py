"""Does the verb `tune` show where the trials are, and refuse a storage that cannot be one?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from penstock.errors import PreflightError
from penstock.flows.cli import app
from penstock.flows.run.request import RunRequest
from penstock.flows.tune.flow import tune
from tests.drills.project import make_project

FOLDER = "a-folder-of-a-name-that-is-too-long-for-a-line"
ADDRESS = "http://127.0.0.1:5000/#/experiments/1234567890/runs/0123456789abcdef0123456789abcdef?workflowType=machine_learning"


@pytest.mark.parametrize(("url", "page"), [(ADDRESS, ADDRESS), (None, f"penstock ui {FOLDER}")])
def test_page_of_the_trials_is_never_cut(monkeypatch: pytest.MonkeyPatch, url: str | None, page: str) -> None:
    def done(*_arguments: Any, **_options: Any) -> dict[str, Any]:
        return {"status": "done", "url": url}

    monkeypatch.setattr("penstock.flows.tune.command._make_sweep", done)
    ended = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["tune", FOLDER])
    assert ended.exit_code == 0 and f"see the trials: {page}\n" in ended.output


@pytest.mark.parametrize("verb", ["tune", "check", "run"])
def test_storage_that_is_a_file_is_named(tmp_path: Path, verb: str) -> None:
    (tmp_path / "file").write_text("")
    file = make_project(tmp_path / "p", files=1)
    sweep = "tune: {metric: val/loss, mode: min, space: {train.epochs: {choice: [1, 2]}}}"
    file.write_text(f"{file.read_text()}storage: {tmp_path}/file\n{sweep}\n")
    ended = CliRunner().invoke(app, [verb, str(file)])
    assert ended.exit_code == 3 and f"{tmp_path}/file is a file, and a storage is a folder" in ended.stderr


def test_store_is_tried_out_before_a_sweep_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError("this key may not delete")

    monkeypatch.setattr(MemoryFileSystem, "rm", denied)
    monkeypatch.setattr(MemoryFileSystem, "rm_file", denied)
    sweep = "tune={space: {train.epochs: {choice: [1, 2]}}}"
    request = RunRequest(file=str(make_project(tmp_path / "p", files=1)), overrides=["storage=memory://sweep/p", sweep])
    with pytest.raises(PreflightError, match=r"storage memory://sweep/p cannot be deleted: .*this key may not delete"):
        tune.fn(request)
