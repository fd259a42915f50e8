"""Which source files are prepared and committed together? Boundaries depend on the files near them, so an added file moves few.

A file ends its unit if a hash of its name says so, with a probability that grows with its size. No total over other files takes
part, except for a cap that keeps units bounded. Source: content-defined chunking, as in LBFS (Muthitacharoen et al., 2001).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from penstock.ingest.files.listing import SourceFile
from penstock.ingest.schema import SPLITS

__all__ = ["CAP", "plan_units"]

CAP = 4
"""No unit of several files exceeds this many times `unit_bytes`."""


def plan_units(files: Sequence[SourceFile], unit_bytes: int) -> list[tuple[SourceFile, ...]]:
    """Group files into units of about `unit_bytes`; one of that size or more is a unit by itself. Order: (location, name).

    A unit never mixes locations.
    """
    units: list[tuple[SourceFile, ...]] = []
    held: list[SourceFile] = []
    held_bytes = 0

    def close() -> None:
        nonlocal held, held_bytes
        if held:
            units.append(tuple(held))
        held, held_bytes = [], 0

    for file in sorted(files, key=lambda file: ([*SPLITS, file.location].index(file.location), file.location, file.name)):
        alone = file.size_bytes >= unit_bytes
        if alone or (held and held[-1].location != file.location) or held_bytes + file.size_bytes > CAP * unit_bytes:
            close()
        held.append(file)
        held_bytes += file.size_bytes
        drawn = int.from_bytes(hashlib.blake2b(file.name.encode(), digest_size=8).digest(), "big") / 2**64
        if alone or drawn < file.size_bytes / unit_bytes:
            close()
    close()
    return units
