"""Does `penstock deploy --predict` refuse what cannot work? (What needs a server: test_deployment_runs.py.)"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.errors import SpecError
from penstock.flows.cli import app
from penstock.flows.predict.deployment import deploy_predictions
from penstock.flows.verbs.deploy.deploy import Plan
from tests.drills.project import make_project

NIGHTLY = "0 3 * * *"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--format", "prquet"), "'prquet'"),
        (("--option", "delimiter=;"), "the format parquet has no options"),
        (("--format", "csv", "--option", "delimitr=;"), "delimitr"),
    ],
)
def test_option_that_the_format_lacks_is_refused(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    file = make_project(tmp_path / "p", files=1)
    wanted = ("--predict", "--input", "rows", "--output", "scores")
    done = CliRunner().invoke(app, ["deploy", str(file), "--cron", NIGHTLY, *wanted, *words])
    assert done.exit_code == 2 and problem in done.stderr


def test_model_without_alias_must_be_named(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", files=1)
    file.write_text(file.read_text().replace("register: {name: drill}", "register: {name: drill, alias: null}"))
    with pytest.raises(SpecError, match="names no alias") as refused:
        deploy_predictions(file, Plan(NIGHTLY), None, {"source": "rows", "output": "scores"}, print)
    assert "--model models:/drill@ALIAS" in refused.value.next_step
