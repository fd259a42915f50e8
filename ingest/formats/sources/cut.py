"""Into what parts is a table cut, so that several read it? Each is some neighbouring files of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

__all__ = ["PART_BYTES", "neighbours"]


PART_BYTES = 256 << 20
"""Of the table's files, which are copied by one thread or task."""

File = TypeVar("File")


def neighbours(files: Iterable[tuple[File, int]]) -> list[tuple[File, ...]]:
    """Files with their sizes in bytes, in groups of `PART_BYTES` and what the last one has beyond."""
    groups: list[list[File]] = []
    size = 0
    for file, file_bytes in files:
        if not groups or size >= PART_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file_bytes
    return [tuple(group) for group in groups]
