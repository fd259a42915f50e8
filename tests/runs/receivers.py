"""Who receives the messages that a test's Prefect server sends? A webhook and a mail server on 127.0.0.1, in threads."""

from __future__ import annotations

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

__all__ = ["SECRET", "Mailbox", "Webhook"]

SECRET = "T0KEN-b7c2f1"
"""Part of the webhook's address, which must be written nowhere."""


class _Threaded:
    """A server whose thread lives as long as the block."""

    server: socketserver.BaseServer

    def __enter__(self) -> Self:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.server.shutdown()
        self.server.server_close()


class Webhook(_Threaded):
    """Keeps the text of every message that is posted to `url`."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        texts = self.texts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posted = json.loads(self.rfile.read(int(self.headers["content-length"])))
                texts.append(posted["text"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/services/{SECRET}"

    def said(self, what: str) -> list[str]:
        """Those messages that hold `what`."""
        return [text for text in self.texts if what in text]


class Mailbox(_Threaded):
    """A mail server that takes every mail, without login or encryption."""

    def __init__(self) -> None:
        self.received: list[str] = []
        received = self.received

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(b"220 test\r\n")
                while line := self.rfile.readline():
                    if line.upper().startswith(b"DATA"):
                        self.wfile.write(b"354 go on\r\n")
                        lines = iter(self.rfile.readline, b".\r\n")
                        received.append(b"".join(lines).decode())
                    self.wfile.write(b"221 bye\r\n" if line.upper().startswith(b"QUIT") else b"250 ok\r\n")

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.url = f"mailto://127.0.0.1:{self.server.server_address[1]}"
