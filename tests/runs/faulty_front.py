"""A server's front that cuts, loses and refuses some of the requests: TCP is handed on, so that websockets pass too."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

__all__ = ["Fault", "faulty_front"]

Fault = Literal["cut", "lost", "refused"]
"""Before the request reaches the server; after it, so that the answer is lost; and an answer of status 500."""

_REQUEST = re.compile(rb"([A-Z]+ \S+) HTTP/1\.1\r\n")
_REFUSAL = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\nConnection: close\r\n\r\nno.\n"


@contextmanager
def faulty_front(port: int, fault: Callable[[str], Fault | None]) -> Iterator[int]:
    """Yield the port of a front of the server at `port`; `fault` gets each request, such as `GET /path`."""
    lock = threading.Lock()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=talk, args=(client,), daemon=True).start()

        def talk(client: socket.socket) -> None:
            with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as server:
                losing = threading.Event()
                answering = threading.Thread(target=answer, args=(server, client, losing), daemon=True)
                answering.start()
                while sent := client.recv(1 << 16):
                    request = _REQUEST.match(sent)
                    kind = None
                    if request is not None:
                        with lock:
                            kind = fault(request[1].decode())
                    if kind == "cut":
                        return
                    if kind == "refused":
                        client.sendall(_REFUSAL)
                        return
                    if kind == "lost":
                        losing.set()
                    server.sendall(sent)
                    if kind == "lost":
                        answering.join(10)
                        return

        def answer(server: socket.socket, client: socket.socket, losing: threading.Event) -> None:
            with contextlib.suppress(OSError):
                # Once it begins to answer, it has done what was asked.
                while (received := server.recv(1 << 16)) and not losing.is_set():
                    client.sendall(received)
                client.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
