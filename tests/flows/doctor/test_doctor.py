"""Does the doctor find what is wrong, name the next command, and keep secrets to itself?"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from penstock.flows.doctor.doctor import Finding, diagnose

SETTINGS = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RAY_ADDRESS")


@pytest.fixture(autouse=True)
def no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


def found(storage: Path | None = None) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(None if storage is None else str(storage))}


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_environment_without_servers_has_no_failure(tmp_path: Path) -> None:
    findings = found(tmp_path / "state")
    assert set(findings) == {"libraries", "torch", "disk", *SETTINGS, f"storage {tmp_path / 'state'}"}
    assert [name for name, finding in findings.items() if finding.status == "fail"] == []
    assert list((tmp_path / "state").iterdir()) == [], "the probe is deleted"


def test_server_that_answers_is_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"127.0.0.1:{server.server_address[1]}"
        for name, url in zip(SETTINGS, (f"http://{address}/api", f"http://{address}", address), strict=True):
            monkeypatch.setenv(name, url)
        assert [found()[name].status for name in SETTINGS] == ["ok"] * 3
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("PREFECT_API_URL", "http://{}/api"),
        ("MLFLOW_TRACKING_URI", "http://{}"),
        ("RAY_ADDRESS", "{}"),
        ("RAY_ADDRESS", "ray://{}"),
    ],
)
def test_unreachable_server_is_named_with_a_fix(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = form.format(closed_port())
    monkeypatch.setenv(name, address)
    finding = found()[name]
    assert finding.status == "fail" and finding.detail.startswith(address) and name in finding.fix


def test_password_of_an_address_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://team:tiger12345@{closed_port()}")
    assert "tiger12345" not in str(found()["MLFLOW_TRACKING_URI"])


def test_storage_below_a_file_ends_with_exit_code_3(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = [sys.executable, "-m", "penstock", "doctor", "--storage", str(tmp_path / "file" / "state"), "--json"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    answer = json.loads(ended.stdout)
    assert answer["status"] == "trouble" and "is a file" in answer["findings"][-1]["detail"]


def test_library_of_another_version_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.flows.doctor.doctor.version", lambda name: "0.0.1")
    finding = found()["libraries"]
    assert finding.status == "fail" and "torch" in finding.detail and finding.fix.startswith("pip install ")
