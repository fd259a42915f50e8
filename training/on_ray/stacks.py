"""At which line of Python is every rank while no step is done? Each writes its stacks when a signal arrives.

`faulthandler` writes them below Python, so a rank that holds the interpreter in native code answers, too. A stopped process
does not: it is killed, and Ray starts the workers again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.installed import PACKAGE_DIR

__all__ = ["Asked", "Place", "Process", "answer_with_stacks", "ask_ranks", "place_in", "user_line"]

WRITE_S = 5.0
"""How long a process may take to write its stacks."""

ANSWER_S = 20.0
"""How long all nodes may take: Ray starts a process on each."""

_NAME = "penstock-stacks"

_STOPPED = "stopped"


class Process(NamedTuple):
    """A rank's process."""

    node: str
    """Ray's id of its node."""
    host: str
    pid: int


class Place(NamedTuple):
    """The place of a rank, as words that follow its name."""

    text: str
    waits: bool
    """Whether it waits for other ranks, and so is not the cause of a standstill."""


Asked = Callable[[], Mapping[int, Place] | None]
"""Returns the place of each rank, or None while an answer is missing and may still come."""


@functools.cache
def answer_with_stacks() -> None:
    """Let this process write its stacks into its own memory on each SIGUSR2. Linux only."""
    if sys.platform == "linux":
        faulthandler.register(signal.SIGUSR2, os.memfd_create(_NAME))


def ask_ranks(processes: Mapping[int, Process]) -> Asked:
    """Request the stacks of ranks, by a task on each of their nodes. Returns at once."""
    task: Any = ray.remote(stacks_of)
    by_node: dict[str, list[int]] = {}
    for rank, process in processes.items():
        by_node.setdefault(process.node, []).append(rank)
    asked = {}
    for node, ranks in by_node.items():
        there = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        pids = [processes[rank].pid for rank in ranks]
        # It takes no CPU: the workers may hold all.
        asked[task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pids)] = ranks
    end_s = time.monotonic() + ANSWER_S

    def answers() -> Mapping[int, Place] | None:
        done, missing = ray.wait(list(asked), num_returns=len(asked), timeout=0, fetch_local=True)
        if missing and time.monotonic() < end_s:
            return None
        found = dict.fromkeys(processes, Place("does not answer", waits=False))
        for each in done:
            with contextlib.suppress(ray.exceptions.RayError):  # its node has gone
                found |= {rank: place_in(text) for rank, text in zip(asked[each], ray.get(each), strict=True)}
        return found

    return answers


def stacks_of(pids: Sequence[int]) -> list[str]:
    """Collect the stacks of processes of this node, empty without an answer; kill stopped ones. Runs in a Ray task."""
    texts = {pid: _stacks_of(pid) for pid in pids}
    for pid, text in texts.items():
        if text == _STOPPED:  # after the others have answered, for they end with it
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).kill()
    return [texts[pid] for pid in pids]


def _stacks_of(pid: int) -> str:
    try:
        links = {path: os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
        file = next((path for path, link in links.items() if link.startswith(f"/memfd:{_NAME}")), None)
        if file is None:  # the signal would kill it
            return ""
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_STOPPED:
            return _STOPPED
        before = written = len(file.read_bytes())
        process.send_signal(signal.SIGUSR2)
        end_s = time.monotonic() + WRITE_S
        while time.monotonic() < end_s:
            time.sleep(0.2)  # there is no sign of the end
            now = len(file.read_bytes())
            if now == written > before:
                return file.read_bytes()[before:].decode(errors="replace")
            written = now
    except (OSError, psutil.Error):  # it has ended
        pass
    return ""


_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)

_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<")

_PHASES = (
    (
        # The last backward of a step ends when all ranks have sent their gradients.
        re.compile(r"/torch/distributed/|/penstock/training/(ranks\.py|step/gradients\.py _complete$)"),
        "waits for the other ranks",
    ),
    (re.compile(r"/penstock/ingest/"), "waits for rows"),
    (re.compile(r"/penstock/training/checkpoint/"), "reads or writes a checkpoint"),
    (re.compile(r"/penstock/training/evaluation/"), "validates"),
    (re.compile(r"/penstock/(training|tasks|machine)/"), "trains"),
)
"""Pattern for file and function of a frame, and the activity there. The innermost frame that matches counts."""


def place_in(stacks: str) -> Place:
    """Find the place of the thread that trains in the text that `faulthandler` wrote."""
    if stacks == _STOPPED:
        return Place("was stopped (SIGSTOP) and is ended now, for its workers to start again", waits=False)
    threads = re.split(r"^(?=Thread |Current thread )", stacks, flags=re.MULTILINE)
    training = next((text for text in threads if "/on_ray/worker.py" in text), "")
    for file, line, function in _FRAME.findall(training):  # the innermost first
        phase = next((phase for pattern, phase in _PHASES if pattern.search(f"{file} {function}")), None)
        if phase is None and _LIBRARY.search(file):
            continue
        return Place(f"{phase or 'is in user code'} ({file}:{line} in {function})", waits=phase == _PHASES[0][1])
    return Place("does not answer with its stack", waits=False)


def user_line(stacks: str) -> str:
    """Find the innermost line of user code in the text that `faulthandler` wrote; empty if there is none."""
    frames = _FRAME.findall(stacks)
    users = (frame for frame in frames if not _LIBRARY.search(frame[0]) and not frame[0].startswith(f"{PACKAGE_DIR}/"))
    return next((f"{file}:{line} in {function}" for file, line, function in users), "")
