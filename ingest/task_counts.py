"""What do the Ray tasks that read and prepare rows cost, by node: time, CPU, rows and bytes?"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

__all__ = ["TaskCounts", "count_rows", "counting"]

_read: Counter[str] = Counter()
"""Of the task that this process runs."""


def count_rows(rows: int, num_bytes: int) -> None:
    """Count rows that a task has read, and their bytes in memory; of a file that is only inspected, its size."""
    _read.update(rows=rows, bytes=num_bytes)


@contextlib.contextmanager
def counting() -> Iterator[Callable[[], tuple[str, dict[str, float]]]]:
    """Count a task; the function returns the node's name and the counts so far: wall_s, cpu_s, rows, bytes."""
    _read.clear()
    began_s, cpu_s = time.monotonic(), time.process_time()

    def counts() -> tuple[str, dict[str, float]]:
        spent = {"wall_s": time.monotonic() - began_s, "cpu_s": time.process_time() - cpu_s}
        return socket.gethostname(), {"tasks": 1, **spent, "rows": 0, "bytes": 0, **_read}

    yield counts


class TaskCounts:
    """Adds up the counts of tasks, by stage and node."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Counter[str]]] = {}

    def add(self, stage: str, node: str, counts: dict[str, float]) -> None:
        """Add a finished task."""
        self._found.setdefault(stage, {}).setdefault(node, Counter()).update(counts)  # type: ignore[arg-type]  # floats add up, too

    def join(self, others: TaskCounts) -> None:
        """Add those of another process."""
        for stage, nodes in others._found.items():
            for node, counts in nodes.items():
                self.add(stage, node, dict(counts))

    def of(self, stage: str) -> dict[str, dict[str, float]]:
        """Return node -> counts of a stage; empty if it ran no task."""
        nodes = self._found.get(stage, {})
        return {node: {name: round(value, 3) for name, value in nodes[node].items()} for node in sorted(nodes)}
