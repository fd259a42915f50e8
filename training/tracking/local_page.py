"""Where will `penstock ui` show the runs of a local store? At the port it had before, so that links and bookmarks stay good."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

__all__ = ["page_port"]

_HOST = "127.0.0.1"


def page_port(memory: Path, *, to_bind: bool = False) -> int:
    """The port that the file `memory` holds; where there is none, one that is free now, which is noted there.

    Args:
        to_bind: a server will listen there at once: where another program has the port, choose anew.
    """
    try:
        port = int(memory.read_text())
    except (OSError, ValueError):
        port = 0
    if not 0 < port < 1 << 16 or (to_bind and _bound(port) is None):
        port = _bound(0) or 0
        with contextlib.suppress(OSError):  # a folder that cannot be written has another address next time
            memory.parent.mkdir(parents=True, exist_ok=True)
            memory.write_text(str(port))
    return port


def _bound(port: int) -> int | None:
    """The port that a server could bind to; None where it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what a closed one left is no hindrance
        try:
            probe.bind((_HOST, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])
