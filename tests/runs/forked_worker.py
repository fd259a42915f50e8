"""Ray starts this in place of a worker or an agent: it has that forked, see `forks.py`, and either ends when the other does.

It imports nothing of ours, so that it takes no time.
"""

import json
import os
import socket
import sys


def _ask(address: str, words: list[str]) -> int:
    """Hand over what this process was started with; returns the exit code of the other once it has ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        request = {"words": words, "pid": os.getpid(), "environment": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        with connection.makefile() as answer:
            _, code = int(answer.readline()), int(answer.readline() or "1")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[1], sys.argv[2:]))
