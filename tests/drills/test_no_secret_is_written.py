"""Secrets in the environment and in addresses, runs that fail and one that succeeds: not one byte of them is written."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.drills.project import make_project
from tests.runs.forked import Command
from tests.runs.servers import free_port, script_environment, serving

pytestmark = [pytest.mark.drill, pytest.mark.slow]

IN_ADDRESS = "canary-in-address"
VARIABLES = {
    "SHOP_DB_PASSWORD": "canary-db/pass+word",
    "AWS_ACCESS_KEY_ID": "canary-key-id-0123",
    "AWS_SECRET_ACCESS_KEY": "/canary/aws+secret",
    "AWS_SESSION_TOKEN": "canary-aws-session",
    "HF_TOKEN": "canary-hf-token",
    "MLFLOW_TRACKING_USERNAME": "alice",
    "MLFLOW_TRACKING_PASSWORD": "canary-mlflow-password",
    "PREFECT_API_KEY": "canary-prefect-key",
    "DATABASE_URL": "postgresql://bob:canary-in-database-url@127.0.0.1:1/db",
}
SECRETS = [value for name, value in VARIABLES.items() if not name.endswith(("USERNAME", "URL"))]
SECRETS += [IN_ADDRESS, "canary-in-dotenv", "canary-in-database-url"]
FORMS = {form.encode() for secret in SECRETS for form in (secret, quote(secret, safe=""))}
FORMS |= {base64.b64encode(f"alice:{secret}".encode()) for secret in SECRETS}

LOUD = """
    steps = 0

    def loss(self, model, batch):
        import logging
        import warnings
        told = f"{os.environ['SHOP_DB_PASSWORD']} at {os.environ['DATABASE_URL']}"
        self.steps += 1
        print("recipe connects with", told)
        if self.steps == 3:
            logging.getLogger("my.recipe").warning("connecting with %s", told)
            warnings.warn(f"insecure: {told}")
        if self.steps == 8 and os.environ.get("DRILL_FAILS"):
            raise ConnectionError(f"cannot connect with {told}") from ValueError(told)
        return nn.functional.cross_entropy(self.predict(model, batch), batch["label"])
"""

LOUD_TRANSFORM = """
import os
import sys


def tell(batch):
    told = os.environ["SHOP_DB_PASSWORD"], os.environ["DATABASE_URL"]
    print("transform connects with", *told)
    print("transform is refused with", *told, file=sys.stderr)
    return scale(batch)
"""

TUNE = """
tune:
  space: {train.learning_rate: {choice: [0.001]}}
"""


@contextmanager
def front(behind: str, refuse: Callable[[str], int | None]) -> Iterator[str]:
    """A server in front of MLflow, which answers some requests with an error that repeats the login; yields host:port."""

    class Handler(BaseHTTPRequestHandler):
        def do_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, text = refuse(self.path), b""
            if status is not None:
                text = f"refused {self.headers.get('Authorization')} for http://alice:{IN_ADDRESS}@host".encode()
            else:
                headers = {"Content-Type": self.headers.get("Content-Type") or "application/json"}
                reply = httpx.request(self.command, behind + self.path, content=body, headers=headers, timeout=60)
                status, text = reply.status_code, reply.content
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_any

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def places_of_secrets(folder: Path) -> list[str]:
    """Files below the folder that hold a secret, read byte by byte: databases, logs, records, artifacts."""
    found = []
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            found += [
                f"{file}: ...{content[max(0, content.index(f) - 80) : content.index(f) + 20]!r}" for f in FORMS if f in content
            ]
    return found


def test_no_secret_is_written_by_runs_that_fail_and_one_that_succeeds(tmp_path: Path) -> None:
    file = make_project(tmp_path / "p", epochs=1, files=2)
    with (file.parent / "model.py").open("a") as model:
        model.write(LOUD)
    with (file.parent / "transforms.py").open("a") as transforms:
        transforms.write(LOUD_TRANSFORM)
    file.write_text(file.read_text().replace("py:scale", "py:tell") + TUNE)
    said = tmp_path / "said"
    said.mkdir()
    state = tmp_path / "servers"
    state.mkdir()
    base = {**VARIABLES, "PENSTOCK_RAY_LOGS": "1", "PREFECT_LOGGING_LEVEL": "DEBUG"}

    def run(name: str, code: int, words: tuple[str, ...] = (), verb: tuple[str, ...] = ("run",), **more: str) -> dict[str, Any]:
        command = Command(*verb, str(file), "--json", *words, environment={**base, **more})
        answer = command.finish(code)
        (said / name).write_text(f"{answer}\n{command.said}")
        return answer

    port, closed = free_port(), free_port()
    server = {**script_environment(state), "MLFLOW_PORT": str(port)}
    with serving("mlflow.sh", environment=server, log=state / "mlflow.log", url=f"http://127.0.0.1:{port}/health"):
        behind = f"http://127.0.0.1:{port}"
        with front(behind, lambda _path: 401) as address:
            run("refused", 3, MLFLOW_TRACKING_URI=f"http://alice:{IN_ADDRESS}@{address}")
        with front(behind, lambda path: 500 if "log-batch" in path or "artifacts" in path else None) as address:
            run("failing", 5, MLFLOW_TRACKING_URI=f"http://alice:{IN_ADDRESS}@{address}", DRILL_FAILS="1")
        run("away", 3, MLFLOW_TRACKING_URI=f"http://alice:{IN_ADDRESS}@127.0.0.1:{closed}")
        run("prefect", 3, PREFECT_API_URL=f"http://alice:{IN_ADDRESS}@127.0.0.1:{closed}/api")
        run("ray", 3, RAY_ADDRESS=f"ray://alice:{IN_ADDRESS}@127.0.0.1:{closed}")
        run("store", 3, ("--set", "storage=s3://bucket/x"), AWS_ENDPOINT_URL=f"http://alice:{IN_ADDRESS}@127.0.0.1:{closed}")
        with front(behind, lambda _path: None) as address:
            answer = run("passing", 0, MLFLOW_TRACKING_URI=f"http://alice:{IN_ADDRESS}@{address}")
            scored = ("predict", answer["model_uri"], str(file.parent / "data/train"), "--output", str(tmp_path / "scores"))
            run("scoring", 0, verb=(*scored, "--file"), MLFLOW_TRACKING_URI=f"http://alice:{IN_ADDRESS}@{address}")
            tracked = {"MLFLOW_TRACKING_URI": f"http://alice:{IN_ADDRESS}@{address}"}
            page = ("report", answer["run"], "--file")
            run("reporting", 0, verb=page, **tracked)
            run("checking", 0, verb=("check",), **tracked)
            run("probing", 0, (), ("probe",), **tracked)
            run("tuning", 0, verb=("tune",), **tracked)
            run("cleaning", 0, ("--keep-runs", "1"), ("clean",), **tracked)
        assert answer["model_uri"] and (tmp_path / "scores").is_dir()
        away = {"MLFLOW_TRACKING_URI": f"http://alice:{IN_ADDRESS}@127.0.0.1:{closed}"}
        run("scoring-away", 3, verb=(*scored, "--file"), **away)
        run("cleaning-away", 3, ("--keep-runs", "1"), ("clean",), **away)
        (file.parent / ".env").write_text("KEY=canary-in-dotenv\n")
        with (file.parent / "model.py").open("a") as model:
            model.write("    SETTINGS = open('.env').read()\n")
        run("dotenv", 2)
    (file.parent / ".env").unlink()
    assert "connecting with *** at" in (said / "passing").read_text()
    for name in ("passing", "checking", "tuning"):
        assert "recipe connects with *** at postgresql://***@" in (said / name).read_text(), name
        assert "transform connects with *** postgresql://***@" in (said / name).read_text(), name
    assert not places_of_secrets(tmp_path)
