"""Does `penstock check` ask the servers that the environment names?"""

from __future__ import annotations

import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from penstock.errors import ServiceError
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.check import check_pipeline
from penstock.flows.verbs.init import create_project


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_check_names_the_server_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, said = load_spec(create_project(tmp_path / "p", "tabular")[0]), list[str]()
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # tests before may have left one to this process
    with ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # it refuses connections, and no other program can take its port meanwhile
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
        Thread(target=server.serve_forever, daemon=True).start()
        for name, wrong, right in (
            ("PREFECT_API_URL", f"http://{nobody}/api", f"http://127.0.0.1:{server.server_port}/api"),
            ("MLFLOW_TRACKING_URI", f"http://{nobody}", f"http://127.0.0.1:{server.server_port}"),
            ("RAY_ADDRESS", nobody, ""),
        ):
            monkeypatch.setenv(name, wrong)
            said.clear()
            with pytest.raises(ServiceError, match=f"{name}={wrong} does not answer") as refused:
                check_pipeline(loaded, said.append)
            assert "start that" in refused.value.next_step
            monkeypatch.setenv(name, right)
        server.shutdown()
    assert "servers    ok   PREFECT_API_URL, MLFLOW_TRACKING_URI" in said
