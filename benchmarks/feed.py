"""How fast does penstock's feed hand out rows, beside numpy's gather and everything else that one could use?

    python -m benchmarks.feed [--rounds 5] [--seconds 3] [--only images] [--out benchmarks/results]

Every contender delivers shuffled batches of 256 rows as torch tensors to 1 consumer process, and to 2 that get a half each. A
round measures all of them one after the other; ratios are taken to numpy's gather in the same
round, and the median over rounds counts. In the first round one whole epoch is checked: every row comes exactly once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.loaders.consumers import measure
from benchmarks.loaders.contenders import CONTENDERS
from benchmarks.loaders.feed_data import TABLES, Rows, arrays
from benchmarks.loaders.mosaic import MOSAIC_CONTENDERS, measure_mosaic, mosaic_version
from benchmarks.loaders.ray_contenders import RAY_CONTENDERS, measure_ray
from benchmarks.machine import describe
from benchmarks.outcome import options_parser, save

VERSIONS = ("numpy", "torch", "pyarrow", "ray", "torchdata", "datasets", "pylance", "grain", "litdata", "webdataset")
CONSUMERS = (1, 2)
NOT_ON_TABLE = ("WebDataset",)
"""A tar member per row of 112 bytes is nobody's use of it."""


def main() -> None:
    """Measure, and write `feed.json`."""
    parser = options_parser(5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", choices=sorted(TABLES))
    parser.add_argument("--match", default="", help="only contenders whose name holds this text, and numpy's gather")
    options = parser.parse_args()
    machine = describe(VERSIONS)
    machine["versions"] |= mosaic_version()
    result: dict[str, Any] = {"machine": machine, "rounds": options.rounds, "seconds": options.seconds, "tables": {}}
    for name in [options.only] if options.only else TABLES:
        result["tables"][name] = _measure_table(TABLES[name], options)
    before = options.out / "feed.json"
    save(options.out, "feed", _added(json.loads(before.read_text()), result) if options.match and before.exists() else result)


def _added(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The results of before, with those of a few contenders: their ratios count, to the gather of their own rounds."""
    for name, table in part["tables"].items():
        new = dict(list(table["contenders"].items())[1:])
        whole["tables"][name]["contenders"] |= new
        whole["tables"][name].setdefault("measured_later", {}).update(dict.fromkeys(new, part["machine"]["date"]))
    return whole


def _measure_table(rows: Rows, options: argparse.Namespace) -> dict[str, Any]:
    home = options.data / rows.name
    arrays(rows, home / "arrays")
    names = [*CONTENDERS, *MOSAIC_CONTENDERS, *RAY_CONTENDERS]
    names = [name for name in names if not (rows.name == "table" and name in NOT_ON_TABLE)]
    names = [name for index, name in enumerate(names) if index == 0 or options.match in name]
    found: dict[str, dict[int, list[float]]] = {name: {world: [] for world in CONSUMERS} for name in names}
    left_out: dict[str, str] = {}
    for number in range(options.rounds):
        for name in names:
            for world in CONSUMERS:
                if name in left_out:
                    continue
                try:
                    rate = _measure(name, rows, home, world, options.seconds, check=number == 0)
                except Exception as error:  # other people's libraries; the report names what failed
                    left_out[name] = f"{type(error).__name__}: {error}"[:300]
                    print(f"{rows.name}: {name} is left out: {left_out[name]}", file=sys.stderr, flush=True)
                    continue
                found[name][world].append(rate)
                print(f"{rows.name} round {number + 1} {name:<40} {world}: {rate:>12,.0f} rows/s", file=sys.stderr, flush=True)
    base = found[names[0]]
    return {
        "rows": rows.rows,
        "row": f"{rows.dtype}{list(rows.shape)} and an int64 label",
        "left_out": left_out,
        "contenders": {
            name: {
                str(world): {
                    "rows_per_s": rates,
                    "median": statistics.median(rates),
                    "of_gather": statistics.median(rate / one for rate, one in zip(rates, base[world], strict=True)),
                    "spread": [min(rates) / statistics.median(rates), max(rates) / statistics.median(rates)],
                }
                for world, rates in by_world.items()
            }
            for name, by_world in found.items()
            if name not in left_out
        },
    }


def _measure(name: str, rows: Rows, home: Path, world: int, seconds: float, *, check: bool) -> float:
    """Rows per second of all consumers together."""
    if name in RAY_CONTENDERS:
        return measure_ray(name, rows, home / "parquet", world)
    if name in MOSAIC_CONTENDERS:
        return measure_mosaic(name, rows, home, world, seconds, check=check)
    return measure(CONTENDERS[name], rows, home, world, seconds, check=check)


if __name__ == "__main__":
    main()
