"""Does a registered model answer raw rows over HTTP, behind MLflow's own server?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import penstock
from tests import ROOT
from tests.runs.servers import free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def server(calm: dict[str, Any], calm_file: Path, tmp_path: Path) -> Iterator[str]:
    """The address of `mlflow models serve` of the model that `calm` has registered."""
    port = free_port()
    uri = f"sqlite:///{calm_file.parent}/.penstock/mlflow/mlflow.db"
    command = ["models", "serve", "-m", calm["model_uri"], "--env-manager", "local", "-h", "127.0.0.1", "-p", str(port)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", *command],
            cwd=tmp_path,
            env={**os.environ, "MLFLOW_TRACKING_URI": uri, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 300
            while True:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=5):
                        break
                except OSError:
                    time.sleep(0.1)  # MLflow's server says nothing when it listens
            yield f"http://127.0.0.1:{port}/invocations"
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(240)


def ask(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())["predictions"]


@pytest.mark.usefixtures("shared_prefect")
def test_raw_rows_are_answered_over_http_as_they_are_in_a_program(calm: dict[str, Any], calm_file: Path, server: str) -> None:
    model = penstock.load_model(calm["model_uri"], f"sqlite:///{calm_file.parent}/.penstock/mlflow/mlflow.db")
    table = pq.read_table(sorted((calm_file.parent / "data" / "train").iterdir())[0]).slice(0, 3).drop_columns(["label"])
    expected = json.loads(model.predict(table).to_json(orient="records", double_precision=15))
    answered = ask(server, {"dataframe_records": table.to_pylist()})
    assert [row["prediction"] for row in answered] == [row["prediction"] for row in expected]
    assert answered[0]["probability"] == pytest.approx(expected[0]["probability"], rel=1e-12)
    rows = [{**row, "mean": float("nan") if index == 1 else row["mean"]} for index, row in enumerate(table.to_pylist())]
    some = ask(server, {"dataframe_records": rows, "params": {"on_error": "report"}})
    assert [row["error"] is None for row in some] == [True, False, True] and "row 1: column 'mean'" in some[1]["error"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, {"dataframe_records": [{"image": table.column("image")[0].as_py()}]})
    assert "mean" in refused.value.read().decode()


SAID = """
answered = len(model.predict(rows))
heavy = sorted({"ray", "prefect"} & set(sys.modules))
print(json.dumps({"inputs": model.inputs.names, "answered": answered, "heavy": heavy}))
"""


@pytest.mark.drill
@pytest.mark.usefixtures("shared_prefect")
def test_the_first_lines_of_the_page_find_a_model_from_inside_the_project_without_prefect_or_ray(
    calm: dict[str, Any], calm_file: Path, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "model.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    rows = pq.read_table(sorted((calm_file.parent / "data" / "train").iterdir())[0]).slice(0, 3).to_pylist()
    light = f"import json, sys\nrows = {rows}\n{page.replace('digits', 'drill')}{SAID}"
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-c", light]
    done = subprocess.run(command, cwd=calm_file.parent / "data", env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"inputs": ["image", "mean", "label"], "answered": 3, "heavy": []}
    lost = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert "no MLflow store was found" in lost.stderr and not list(tmp_path.iterdir())
    store = f"sqlite:///{calm_file.parent}/.penstock/mlflow/mlflow.db"
    by_run = [penstock.load_model(run, store) for run in (calm["run"], calm["mlflow_run_id"])]
    assert [model.classes for model in by_run] == [None, None]
