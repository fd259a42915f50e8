"""Are configured services honoured, missing ones named, and telemetry off unless asked for?"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.errors import ServiceError
from penstock.flows.servers import services
from penstock.flows.servers.prefect_server import ServerFiles, ServerInfo
from penstock.flows.servers.services import check_mlflow_answers, prefect_api, prepare_environment
from penstock.flows.verbs import ui
from penstock.training.tracking.mlflow_backend import patiently
from penstock.training.tracking.mlflow_store import mlflow_uri


def test_telemetry_is_off_unless_the_user_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "true")
    prepare_environment()
    assert os.environ["DO_NOT_TRACK"] == "true" and os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"


def test_libraries_read_their_telemetry_as_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.telemetry.utils import is_telemetry_disabled
    from prefect._internal.analytics.enabled import is_telemetry_enabled
    from ray._common.usage.usage_lib import UsageStatsEnabledness, _usage_stats_enabledness

    monkeypatch.delenv("CI", raising=False)
    prepare_environment()
    assert not is_telemetry_enabled()
    assert is_telemetry_disabled()
    assert _usage_stats_enabledness() is UsageStatsEnabledness.DISABLED_EXPLICITLY


def test_mlflow_defaults_to_database_in_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert mlflow_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert mlflow_uri(tmp_path) == "http://mlflow:5000"


def test_absent_prefect_api_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(ServiceError, match=r"PREFECT_API_URL=http://127\.0\.0\.1:9/api does not answer"), prefect_api(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_server_that_does_not_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_BOOT_S", 0.3)
    files = ServerFiles(tmp_path)
    files.prepare()
    files.log.write_text("booting\nwaiting for the disk\n")
    with (
        files.locked("server"),  # of a process that is stuck
        pytest.raises(
            ServiceError, match=r"did not start within 0\.3 s: it has published no address; the last .*server\.log:"
        ) as one,
        prefect_api(tmp_path),
    ):
        pass
    assert one.value.problems == ("booting", "waiting for the disk")
    assert one.value.next_step.startswith("run the same command again")
    files.write_info(ServerInfo(pid=1, port=9, url="http://127.0.0.1:9/api"))
    with (
        files.locked("server"),
        pytest.raises(ServiceError, match=r"127\.0\.0\.1:9/api/health does not"),
        prefect_api(tmp_path),
    ):
        pass


def test_prefect_page_address_is_refused_with_api_address(
    prefect_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_url.removesuffix("/api"))
    with pytest.raises(ServiceError, match="ends in /api") as told, prefect_api(tmp_path):
        pass
    assert told.value.next_step == f"export PREFECT_API_URL={prefect_url}"


WAITS = {"the Prefect server", "MLflow's page", "MLflow, to register the model"}


def test_long_wait_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, printed = threading.Event(), io.StringIO()  # capsys loses lines that other threads print while it is read
    monkeypatch.setattr(sys, "stderr", printed)

    class Slow(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.wait(120)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    def prefect() -> None:
        with prefect_api(tmp_path):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server, ThreadPoolExecutor(4) as pool:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        monkeypatch.setattr(
            ui, "_start_mlflow", lambda *_: subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        )
        monkeypatch.setattr(ui, "_stop", lambda server: server.communicate(b"\n"))
        pool.submit(server.serve_forever)
        deadline = time.monotonic() + 120
        try:
            page = ui._mlflow_page("sqlite:///none.db", tmp_path, told, None)
            waits = [pool.submit(prefect), pool.submit(page.__enter__)]
            waits.append(pool.submit(patiently, "register the model", lambda: told.wait(120)))
            while not all(f"  waiting for {what}\n" in printed.getvalue() for what in WAITS) and time.monotonic() < deadline:
                time.sleep(0.05)  # the lines come when they come
            told.set()
            for wait in waits:
                wait.result()
            page.__exit__(None, None, None)
        finally:  # the executor waits for its threads, one of which serves until then
            told.set()
            server.shutdown()
    assert sorted(printed.getvalue().splitlines()) == sorted(f"  waiting for {what}" for what in WAITS)


def test_missing_mlflow_server_is_named_before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:hunter2@127.0.0.1:9")
    with pytest.raises(ServiceError, match=r"MLFLOW_TRACKING_URI=http://\S+@127\.0\.0\.1:9 does not answer") as told:
        check_mlflow_answers()
    assert "hunter2" not in str(told.value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///nowhere.db")
    check_mlflow_answers()
