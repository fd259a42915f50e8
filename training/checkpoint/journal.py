"""Which metric points survive a crash? Those sealed into the run's storage before the checkpoint they belong to.

Points are kept in memory until the next checkpoint and written as one segment file just before its manifest is committed.
Points after the last checkpoint need no disk: their steps are executed again. Points that a tracking server missed are
replayed from here.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

from pydantic_core import to_json

from penstock.storage import Storage
from penstock.training.checkpoint.fence import Writer
from penstock.training.events import Point

__all__ = ["read_journal", "seal_points", "truncate_journal"]

_log = logging.getLogger("penstock.tracking")

_FOLDER = "journal"

_SEGMENT = re.compile(r"^(?P<step>\d{10,})-a(?P<attempt>\d+)-r(?P<restart>\d+)\.jsonl$")


class _Segment(NamedTuple):
    step: int
    writer: Writer
    path: str


def seal_points(run_storage: Storage, writer: Writer, step: int, points: Iterable[Point]) -> None:
    """Make points durable in a segment of `writer`. Call it before the manifest of checkpoint `step` is committed.

    A checkpoint without new points writes nothing.
    """
    lines = [to_json({"t": p.t_ms, "s": p.step, "v": dict(p.values)}, inf_nan_mode="constants") for p in points]
    if not lines:
        return
    path = f"{_FOLDER}/{step:010d}-{writer}.jsonl"
    if run_storage.exists(path):  # validation after a checkpoint seals the same step again
        lines = [*run_storage.read_bytes(path).splitlines(), *lines]
    run_storage.write_bytes(path, b"\n".join(lines) + b"\n")


def read_journal(run_storage: Storage, up_to_step: int, *, after_step: int = -1) -> list[Point]:
    """Read the sealed points with `after_step` < seal and step <= `up_to_step`, in order of step, each (step, name) once.

    If a step was executed more than once, the values sealed last count. The unreadable rest of a segment is left out with a
    warning: a run must not end because a chart lacks a number.

    Args:
        run_storage: the run's storage.
        up_to_step: the step of the checkpoint that counts.
        after_step: leave out segments sealed at or before this step, which the server holds already.
    """
    segments = [s for s in _segments(run_storage) if s.step > after_step] if up_to_step > after_step else []
    seen: set[tuple[int, str]] = set()
    points: list[Point] = []
    for segment in sorted(segments, key=lambda s: (s.writer, s.step), reverse=True):
        for point in reversed(_read_segment(run_storage, segment.path)):
            values = {name: value for name, value in point.values.items() if (point.step, name) not in seen}
            if values and point.step <= up_to_step:
                points.append(point._replace(values=values))
                seen.update((point.step, name) for name in values)
    return sorted(points, key=lambda point: (point.step, point.t_ms))


def truncate_journal(run_storage: Storage, step: int) -> None:
    """Drop the segments sealed after `step`, which a resume from checkpoint `step` executes again."""
    for segment in _segments(run_storage):
        if segment.step > step:
            run_storage.delete(segment.path)


def _segments(run_storage: Storage) -> list[_Segment]:
    found = []
    for name in run_storage.list(_FOLDER):
        match = _SEGMENT.match(name)
        if match:
            writer = Writer(int(match["attempt"]), int(match["restart"]))
            found.append(_Segment(int(match["step"]), writer, f"{_FOLDER}/{name}"))
    return sorted(found)


def _read_segment(run_storage: Storage, path: str) -> list[Point]:
    points = []
    try:
        for line in run_storage.read_bytes(path).splitlines():
            record = json.loads(line)
            points.append(Point(int(record["t"]), int(record["s"]), {str(k): float(v) for k, v in record["v"].items()}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning(
            "%s is damaged after %d points (%s); its other points will be missing on the tracking server",
            run_storage.uri(path),
            len(points),
            error,
        )
    return points
