"""Is it known at which line of Python a rank is, whatever it does, and is one that was stopped ended?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.training.on_ray.stacks import Place, place_in, stacks_of
from tests import ROOT

RANK = """
import sys, threading
from penstock.training.on_ray.stacks import answer_with_stacks

answer_with_stacks()
print("up", flush=True); sys.stdin.readline()
"""


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", RANK], cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


def test_process_writes_stacks_and_continues(rank: subprocess.Popen[str]) -> None:
    first, other, second = (*stacks_of([rank.pid, os.getpid()]), *stacks_of([rank.pid]))
    assert 'File "<string>", line 6' in first and second.count("line 6") == 1
    assert other == "", "a process that is not a rank is left alone"
    rank.communicate("\n", timeout=60)
    assert rank.returncode == 0 and stacks_of([rank.pid]) == [""]


def test_stopped_process_is_killed(rank: subprocess.Popen[str]) -> None:
    rank.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
    (text,) = stacks_of([rank.pid])
    assert place_in(text).text.startswith("was stopped (SIGSTOP)")
    assert rank.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (["/srv/lib/python3.11/site-packages/torch/distributed/c10d.py"], "waits for the other ranks"),
        (["/srv/lib/python3.11/threading.py", "/x/penstock/training/ranks.py"], "waits for the other ranks"),
        (["/srv/lib/python3.11/queue.py", "/x/penstock/ingest/feed/read_ahead.py"], "waits for rows"),
        (["/srv/lib/python3.11/socket.py", "/home/ray/model.py", "/x/penstock/ingest/map.py"], "is in user code"),
        (["/srv/lib/python3.11/os.py", "/x/penstock/training/checkpoint/writer.py"], "reads or writes a checkpoint"),
    ],
)
def test_innermost_frame_outside_libraries_counts(frames: list[str], place: str) -> None:
    def thread(files: list[str]) -> str:
        return "Thread 0x1 (most recent call first):\n" + "".join(f'  File "{file}", line 3 in work\n' for file in files)

    own = "/x/penstock/training/on_ray/worker.py"
    found = place_in(thread(["/home/me/other.py"]) + thread([*frames, own]) + thread([frames[0]]))
    at = next(file for file in frames if "lib/python" not in file or "torch" in file)
    assert found == Place(f"{place} ({at}:3 in work)", waits=place == "waits for the other ranks")
    assert place_in("").text == "does not answer with its stack"
