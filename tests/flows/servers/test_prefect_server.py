"""Is the embedded Prefect server one for all, gone when nobody needs it, and does it record everything before it goes?"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.flows.servers.prefect_server import LINGER_ENV, ServerFiles, ServerInfo
from penstock.flows.servers.services import prefect_api
from tests import ROOT
from tests.penstock.databases import MARK, marked, tables_of
from tests.runs.servers import eventually

CLIENT = """
import sys
from pathlib import Path
from penstock.flows.servers.services import prefect_api
with prefect_api(Path(sys.argv[1])) as service:
    print(service.api_url, service.embedded, flush=True)
    sys.stdin.readline()
"""

FLOW = """
import sys
from pathlib import Path
from penstock.flows.servers.prefect_server import ServerFiles
from penstock.flows.servers.services import prefect_api
with prefect_api(Path(sys.argv[1])):
    print(ServerFiles(Path(sys.argv[1])).read_info().pid)
    from prefect import flow, task

    @task
    def work(n):
        return n

    @flow
    def many():
        for n in range(50):
            work(n)

    many()
"""


def launch(code: str, state: Path, linger_s: str = "0.5", **settings: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PYTHONPATH": str(ROOT), LINGER_ENV: linger_s, **settings}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(state)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def info(state: Path) -> ServerInfo:
    found = ServerFiles(state).read_info()
    assert found is not None
    return found


def wait_for_end(pid: int) -> None:
    """A server is the child of a client that may be gone, so nobody here can wait for it as for a child."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], 60)[0], f"the server {pid} is still there"
    finally:
        os.close(handle)


@pytest.mark.drill
def test_settings_of_a_team_and_a_proxy_are_not_the_servers(tmp_path: Path) -> None:
    state, team = tmp_path / "what?x=1", tmp_path / "team.db"
    state.mkdir()
    (state / "prefect.toml").write_text('[server.api]\nauth_string = "admin:team"\n')
    settings = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{team}",
        "PREFECT_SERVER_API_AUTH_STRING": "admin:team",
        "PREFECT_SERVER_API_BASE_PATH": "/team",
        "http_proxy": "http://127.0.0.1:9",
    }
    client = launch(CLIENT, state, **settings)
    assert first_line(client).endswith("/api True")
    server = info(state)
    client.communicate("\n", timeout=300)
    wait_for_end(server.pid)
    assert "flow_run" in tables_of(state / "prefect" / "prefect.db")
    assert [path.name for path in tmp_path.iterdir()] == ["what?x=1"]


@pytest.mark.drill
def test_task_runs_of_a_short_flow_are_recorded(tmp_path: Path) -> None:
    client = launch(FLOW, tmp_path)
    said, _ = client.communicate(timeout=300)
    assert client.returncode == 0
    wait_for_end(int(said.splitlines()[0]))
    with sqlite3.connect(tmp_path / "prefect" / "prefect.db") as database:
        rows = database.execute("select state_type, count(*) from task_run group by 1").fetchall()
    assert rows == [("COMPLETED", 50)]


@pytest.mark.drill
def test_processes_share_one_server_until_the_last_ends(tmp_path: Path) -> None:
    clients = [launch(CLIENT, tmp_path) for _ in range(3)]
    lines = [first_line(client) for client in clients]
    assert len(set(lines)) == 1 and lines[0].endswith("/api True")
    server = info(tmp_path)
    assert psutil.Process(server.pid).net_connections()[0].laddr.ip == "127.0.0.1"

    clients[0].send_signal(signal.SIGKILL)
    clients[1].communicate("\n", timeout=300)
    late = launch(CLIENT, tmp_path)
    assert first_line(late) == lines[0]
    late.send_signal(signal.SIGKILL)
    assert psutil.pid_exists(server.pid) and info(tmp_path) == server

    clients[2].send_signal(signal.SIGKILL)
    for client in (*clients, late):
        client.wait(300)
    wait_for_end(server.pid)
    assert ServerFiles(tmp_path).read_info() is None and ServerFiles(tmp_path).is_free("server")

    again = launch(CLIENT, tmp_path)
    assert first_line(again) == lines[0], "the port is kept, so that a bookmark stays good"
    later = info(tmp_path)
    assert later.pid != server.pid
    again.communicate("\n", timeout=300)
    wait_for_end(later.pid)


@pytest.mark.drill
def test_dead_server_restarts_on_its_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(LINGER_ENV, "0.5")
    with prefect_api(tmp_path) as service:
        first = info(tmp_path)
        os.kill(first.pid, signal.SIGKILL)
        wait_for_end(first.pid)
        again = eventually(lambda: found if (found := ServerFiles(tmp_path).read_info()) != first else None, 300, "another")
        assert again is not None and again.url == first.url == service.api_url == os.environ["PREFECT_API_URL"]
    assert "PREFECT_API_URL" not in os.environ
    wait_for_end(again.pid)


@pytest.mark.drill
def test_server_without_its_folder_ends(tmp_path: Path) -> None:
    client = launch(CLIENT, tmp_path)
    first_line(client)
    server = info(tmp_path)
    while (tmp_path / "prefect").exists():  # its database makes a file in the midst of it now and then
        shutil.rmtree(tmp_path / "prefect", ignore_errors=True)
    wait_for_end(server.pid)
    client.send_signal(signal.SIGKILL)
    client.wait(300)


def block_types_of(state: Path) -> set[str]:
    with sqlite3.connect(state / "prefect" / "prefect.db") as database:
        return {slug for (slug,) in database.execute("select slug from block_type")}


@pytest.mark.drill
def test_empty_database_is_copied_unless_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))

    def tables_of_new(name: str) -> set[str]:
        process = launch(CLIENT, tmp_path / name)
        assert first_line(process).endswith("True")
        process.communicate("\n", timeout=300)
        return tables_of(tmp_path / name / "prefect" / "prefect.db")

    made = tables_of_new("first")
    kept = marked(tmp_path / "cache", empty="flow_run")
    assert tables_of_new("second") == made | {MARK}
    assert block_types_of(tmp_path / "second") == block_types_of(tmp_path / "first") > {"secret", "slack-webhook", "webhook"}
    kept.write_bytes(kept.read_bytes()[:5000])
    assert tables_of_new("third") == made
    assert tables_of_new("fourth") == made, "the damaged copy has been replaced"
