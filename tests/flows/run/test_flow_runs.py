"""A Prefect server that answers one of our calls with anything at all costs what that call would show, and never a run."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import prefect
import pytest
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import MissingResult
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Completed

from penstock.errors import DataError, ServiceError
from penstock.flows.run.flow_runs import flow_result, name_flow_run, remember_end, report_end
from penstock.machine.process import ProcessIdentity
from penstock.tasks import prefect_away, stage
from penstock.tasks.context import StageOutcome
from penstock.tasks.prefect_away import prefect_answers
from penstock.tasks.records.ledger import Attempt

ANSWERS: dict[str, tuple[int, bytes] | None] = {
    "a page of a proxy": (200, b"<html>Please log in</html>"),
    "something else": (200, b'{"no": "flow run"}'),
    "half an answer": (200, b'{"id": "'),
    "401": (401, b"{}"),
    "404": (404, b"{}"),
    "409": (409, b"{}"),
    "500": (500, b"Internal Server Error"),
    "a cut connection": None,
}

WELL = {"/health": (200, b"true"), "/version": (200, f'"{prefect.__version__}"'.encode()), "/csrf-token": (404, b"{}")}


class Server:
    """Answers health checks as Prefect would, and all else with `answer`.

    Attributes:
        greets: what a client asks first, its version and whether it wants a token, is answered well too.
        answer: (status, body) of the others; None cuts the connection.
        asked: requests that got this answer.
        greeted: requests that were answered well.
    """

    def __init__(self) -> None:
        self.greets, self.answer, self.asked, self.greeted = True, ANSWERS["500"], 0, 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_any(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                found = next((good for part, good in WELL.items() if part in self.path), None)
                if found is None or not (server.greets or "health" in self.path):
                    server.asked, found = server.asked + 1, server.answer
                else:
                    server.greeted += 1
                if found is None:
                    self.close_connection = True
                    self.connection.close()
                    return
                self.send_response(found[0])
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(found[1])))
                self.end_headers()
                self.wfile.write(found[1])

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_any

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *_: None  # type: ignore[method-assign]  # of a connection that it has cut itself
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    url = f"http://127.0.0.1:{server.http.server_port}/api"
    with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield server
    server.http.shutdown()


@pytest.mark.parametrize(("holds_s", "asked_again"), [(3600.0, False), (0.0, True)])
def test_server_that_answered_is_not_checked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch, holds_s: float, asked_again: bool
) -> None:
    assert prefect_answers()
    monkeypatch.setattr(prefect_away, "_STILL_S", holds_s)
    before = server.greeted
    assert prefect_answers() and (server.greeted > before) == asked_again


@pytest.mark.parametrize("greets", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
def test_any_answer_of_prefect_server_keeps_run(
    server: Server, monkeypatch: pytest.MonkeyPatch, answer: str, greets: bool
) -> None:
    identity = uuid.uuid4()
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(identity))
    told: list[str] = []
    run, attempt = SimpleNamespace(pipeline="p", run="r"), SimpleNamespace(changed=())
    ctx: Any = SimpleNamespace(run=run, attempt=attempt, tracker=SimpleNamespace(url=None, run_id="m"), warn=told.append)
    here = ProcessIdentity.current()
    ended = Attempt(number=1, started="", process=here, status="done", prefect_flow_run_id=str(identity))

    def ask(what: Any) -> Any:
        server.greets, server.answer, server.asked = greets, ANSWERS[answer], 0
        found = what()
        assert server.asked
        return found

    assert prefect_answers()
    ask(lambda: name_flow_run("name", ["tag"]))
    assert ask(lambda: report_end(ended)) == (answer == "404"), "else it is sent again, unless it does not know the flow run"
    ask(lambda: stage._publish(ctx, StageOutcome("read", "k", "ran", 1.0, {}, (), (), "")))
    assert [line.startswith("read: no Prefect artifact: ") for line in told] == [True] * (
        answer != "something else" or not greets
    )


@pytest.mark.parametrize("end", [Completed(data={"status": "done"}), DataError("the rows are wrong")])
def test_flow_end_survives_lost_answer_of_server(end: State[Any] | DataError) -> None:
    def perform() -> State[Any]:
        """As Prefect's engine does, which asks again and gets the server's own copy of the state."""
        remember_end(end)
        return State(type=StateType.FAILED if isinstance(end, DataError) else StateType.COMPLETED)

    if isinstance(end, DataError):
        with pytest.raises(DataError, match="the rows are wrong"):
            flow_result(perform)
    else:
        assert flow_result(perform) == {"status": "done"}

    def refused() -> State[Any]:
        remember_end(end)
        raise httpx.HTTPError("500 Internal Server Error")  # as of a full disk, where the flow's own error matters

    with pytest.raises(DataError if isinstance(end, DataError) else ServiceError):
        flow_result(refused)
    with pytest.raises(MissingResult):
        flow_result(lambda: State(type=StateType.COMPLETED))


@prefect.flow
def nothing() -> None:
    raise AssertionError("it has not begun")


@pytest.mark.parametrize("greets", [True, False])
@pytest.mark.parametrize("answer", ANSWERS)
def test_failing_server_before_flow_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch, answer: str, greets: bool
) -> None:
    server.greets, server.answer = greets, ANSWERS[answer]
    monkeypatch.setenv("PREFECT_API_URL", "http://prefect.example/api")
    with pytest.raises(
        ServiceError, match=r"the Prefect server http://prefect\.example/api fails: .+(?s:.*)same command again"
    ):
        flow_result(lambda: nothing(return_state=True))
