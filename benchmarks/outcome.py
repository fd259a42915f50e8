"""How is measured, in rounds; how are measurements compared, and where do they go?"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["beside_the_first", "learning_times", "options_parser", "rows_per_s", "save"]


def options_parser(rounds: int) -> argparse.ArgumentParser:
    """The options that benchmarks have in common.

    Args:
        rounds: how often everything is measured unless `--rounds` says otherwise.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir(), "penstock-bench"), help="where rows are kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser


def rows_per_s(title: str, variants: Iterable[str], rounds: int, measure: Callable[[str], float]) -> dict[str, list[float]]:
    """Measure all variants one after the other, round by round, and say each result at once: variant -> one value per round."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, values in found.items():
            values.append(measure(name))
            print(f"{title} round {number + 1} {name:<40} {values[-1]:>12,.0f} rows/s", file=sys.stderr, flush=True)
    return found


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


def learning_times(folder: Path, result: Mapping[str, Any]) -> dict[int, float]:
    """When each step on record ended, in seconds since 1970, by the points that rank 0 keeps.

    Args:
        folder: the project, whose storage is `.penstock`.
        result: what `penstock run --json` says of the run.
    """
    journal = sorted((folder / ".penstock" / "runs" / result["run"] / "journal").iterdir())
    points = [json.loads(line) for part in journal for line in part.read_text().splitlines()]
    return {point["s"]: point["t"] / 1000 for point in points if point["s"]}


def save(folder: Path, name: str, result: Mapping[str, Any]) -> None:
    """Write `result` as `name`.json, which benchmarks/report.py reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
