"""How are measurements compared, and where do they go?"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["beside_the_first", "save"]


def beside_the_first(found: Mapping[str, Sequence[float]], unit: str) -> dict[str, dict[str, Any]]:
    """What was measured of each variant, round by round: all values, their median, and the median ratio to the first variant's.

    Args:
        found: variant -> one value per round.
        unit: what the values are; their name in the result.
    """
    base = next(iter(found.values()))
    return {
        name: {
            unit: list(values),
            "median": statistics.median(values),
            "of_by_hand": statistics.median(value / one for value, one in zip(values, base, strict=True)),
        }
        for name, values in found.items()
    }


def save(folder: Path, name: str, result: Mapping[str, Any]) -> None:
    """Write `result` as `name`.json, which benchmarks/report.py reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
