"""Does the doctor find what is wrong, name the next command, keep secrets to itself, and never hang?"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.flows.answer import LineConsole
from penstock.flows.verbs import doctor
from penstock.flows.verbs.doctor import Finding, diagnose, fail, ok, run_checks, show_findings, warn
from penstock.storage import Storage
from tests.servers.swift import SwiftServer


@contextmanager
def http_server(replies: Mapping[str, int], login: str = "") -> Iterator[str]:
    """A real HTTP server that answers the paths of `replies` with a status; others with 401, unless `login` is sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            refused = bool(login) and path not in replies and self.headers.get("Authorization") != login
            self.send_response(401 if refused else replies.get(path, 200))
            self.end_headers()
            self.wfile.write(b'"3.8.8"')

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def nobody() -> str:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_environment_without_servers_has_no_failure(tmp_path: Path) -> None:
    findings = diagnose(str(tmp_path / "state"), environ={})
    assert [finding for finding in findings if finding.status == "fail"] == []
    names = [finding.name for finding in findings]
    assert {"libraries", "torch", "PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RAY_ADDRESS"} <= set(names)
    assert f"storage {tmp_path / 'state'}" in names


def test_answering_server_is_ok() -> None:
    with http_server({"/api/health": 200}) as url:
        assert doctor.check_prefect({"PREFECT_API_URL": f"{url}/api"}).status == "ok"
        assert doctor.check_mlflow({"MLFLOW_TRACKING_URI": url}).status == "ok"
        assert doctor.check_ray({"RAY_ADDRESS": url.removeprefix("http://")}).status == "ok"


@pytest.mark.parametrize(
    ("look", "setting", "form"),
    [
        (doctor.check_prefect, "PREFECT_API_URL", "http://{}/api"),
        (doctor.check_mlflow, "MLFLOW_TRACKING_URI", "http://{}"),
        (doctor.check_ray, "RAY_ADDRESS", "{}"),
        (doctor.check_ray, "RAY_ADDRESS", "ray://{}"),
    ],
)
def test_unreachable_server_is_named_with_setting(look, setting: str, form: str) -> None:  # type: ignore[no-untyped-def]
    address = nobody()
    finding = look({setting: form.format(address)})
    assert (finding.name, finding.status) == (setting, "fail")
    assert address in finding.detail
    assert setting in finding.fix


def test_ray_address_without_port_is_refused() -> None:
    finding = doctor.check_ray({"RAY_ADDRESS": "head-node"})
    assert finding.status == "fail"
    assert "no port" in finding.detail


def test_missing_login_fails_and_right_one_passes() -> None:
    with http_server({"/api/health": 200, "/health": 200}, login="Basic dXNlcjpzZXNhbWU=") as url:
        prefect = {"PREFECT_API_URL": f"{url}/api"}
        refused = doctor.check_prefect(prefect)
        assert refused.status == "fail"
        assert "PREFECT_API_AUTH_STRING" in refused.fix
        assert doctor.check_prefect({**prefect, "PREFECT_API_AUTH_STRING": "user:sesame"}).status == "ok"
        mlflow = {"MLFLOW_TRACKING_URI": url}
        assert "MLFLOW_TRACKING_USERNAME" in doctor.check_mlflow(mlflow).fix
        login = {"MLFLOW_TRACKING_USERNAME": "user", "MLFLOW_TRACKING_PASSWORD": "sesame"}
        assert doctor.check_mlflow({**mlflow, **login}).status == "ok"
        inside = url.replace("http://", "http://user:sesame@")
        assert doctor.check_mlflow({"MLFLOW_TRACKING_URI": inside}).status == "ok"


def test_findings_hide_secrets() -> None:
    address = nobody()
    environ = {
        "PREFECT_API_URL": f"http://someone:sesame@{address}/api",
        "PREFECT_API_AUTH_STRING": "someone:sesame",
        "MLFLOW_TRACKING_URI": f"http://someone:sesame@{address}",
        "MLFLOW_TRACKING_TOKEN": "sesame",
        "RAY_ADDRESS": f"ray://someone:sesame@{address}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "sesame",
    }
    findings = diagnose(None, environ)
    assert sum(finding.status == "fail" for finding in findings) == 3
    assert "sesame" not in "".join(finding.model_dump_json() for finding in findings)


@pytest.mark.parametrize(
    ("environ", "token_file", "status"),
    [
        ({}, False, "ok"),
        ({"RAY_AUTH_MODE": "maybe"}, False, "fail"),
        ({"RAY_AUTH_MODE": "token"}, False, "fail"),
        ({"RAY_AUTH_MODE": "token"}, True, "ok"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x"}, False, "ok"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, False, "fail"),
        ({"RAY_ADDRESS": "head:6379"}, False, "warn"),
        ({"RAY_ADDRESS": "head:6379", "RAY_AUTH_MODE": "disabled"}, False, "warn"),
        ({"RAY_ADDRESS": "head:6379", "RAY_AUTH_MODE": "token"}, True, "ok"),
    ],
)
def test_settings_of_rays_authentication_are_compared(
    environ: dict[str, str], token_file: bool, status: str, tmp_path: Path
) -> None:
    if token_file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("x")
    assert doctor.check_ray_auth(environ, home=tmp_path).status == status


def test_wrong_library_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["fastapi<0.1", "numpy>=1", "not-there>=2", "pytest>=9; extra == 'dev'"]
    monkeypatch.setattr(doctor, "requires", lambda _name: wanted)
    findings = doctor.check_libraries()
    assert [(finding.name, finding.status) for finding in findings] == [("fastapi", "fail"), ("not-there", "fail")]
    assert "<0.1" in findings[0].detail and "0." in findings[0].detail
    assert "not installed" in findings[1].detail


def test_disk_of_missing_storage_is_its_parents(tmp_path: Path) -> None:
    storage, *_ = doctor.check_disks(str(tmp_path / "not" / "yet"))
    assert str(tmp_path) in storage.detail


def test_hanging_or_failing_check_is_a_finding() -> None:
    never = threading.Event()

    def hang() -> list[Finding]:
        never.wait()
        return []

    def breaks() -> list[Finding]:
        raise RuntimeError("inside")

    findings = run_checks([("slow", hang), ("broken", breaks), ("fine", lambda: [ok("fine", "yes")])], deadline_s=0.5)
    never.set()
    assert [(finding.name, finding.status) for finding in findings] == [("slow", "fail"), ("broken", "fail"), ("fine", "ok")]
    assert "no answer within 0.5 s" in findings[0].detail
    assert "RuntimeError: inside" in findings[1].detail


def test_unwritable_folder_and_file_in_its_place_fail(tmp_path: Path) -> None:
    (finding,) = doctor.check_storage(Storage("/proc/nothing"), {})
    assert finding.status == "fail" and "an object cannot be written" in finding.detail
    (tmp_path / "file").write_text("in the way")
    (finding,) = doctor.check_storage(Storage(str(tmp_path / "file")), {})
    assert finding.status == "fail" and f"{tmp_path}/file is a file" in finding.detail


def test_checked_storage_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    (finding,) = doctor.check_storage(Storage(str(tmp_path)), {})
    assert finding.status == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_working_bucket_is_left_empty(s3_bucket: str) -> None:
    findings = doctor.check_storage(Storage(f"{s3_bucket}/prefix"), os.environ)
    assert [(finding.name, finding.status) for finding in findings] == [
        (f"storage {s3_bucket}/prefix", "ok"),
        ("conditional put", "ok"),
    ]
    assert Storage(s3_bucket).list() == []


def test_missing_bucket_is_found(s3_bucket: str) -> None:
    (finding,) = doctor.check_storage(Storage("s3://not-there-at-all/prefix"), os.environ)
    assert finding.status == "fail"
    assert "not-there-at-all" in finding.name
    assert "bucket exists" in finding.fix


def test_wrong_secret_is_found_and_hidden(s3_bucket: str, s3_server: SwiftServer) -> None:
    code = (
        "import os, json; from penstock.flows.verbs.doctor import check_storage; from penstock.storage import Storage;"
        f"print(check_storage(Storage({s3_bucket!r}), os.environ)[0].model_dump_json())"
    )
    environ = {**os.environ, **s3_server.environment, "AWS_SECRET_ACCESS_KEY": "open-sesame"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    finding = Finding.model_validate_json(done.stdout)
    assert finding.status == "fail"
    assert "AWS_SECRET_ACCESS_KEY" in finding.fix and "bucket exists" not in finding.fix
    assert "refuses the credentials" in finding.detail and "Next:" not in finding.detail
    assert "open-sesame" not in done.stdout + done.stderr


def test_missing_endpoint_is_found_before_client_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = f"http://{nobody()}"
    (finding,) = doctor.check_storage(Storage("s3://any/prefix"), {"AWS_ENDPOINT_URL": endpoint})
    assert finding.status == "fail"
    assert endpoint in finding.detail


def test_findings_are_lines_with_fixes_and_sum() -> None:
    text = io.StringIO()
    console = LineConsole(file=text, width=200)
    show_findings([ok("a", "fine"), warn("bb", "[odd]", "do this"), fail("c", "gone", "do that")], console)
    lines = text.getvalue().splitlines()
    assert lines[0] == "ok    a   fine"
    assert lines[1:3] == ["warn  bb  [odd]", "          -> do this"]
    assert lines[-1] == "1 ok, 1 to watch, 1 in the way"
