"""How fast does penstock's feed hand out rows, beside the memory's limit and everything else that one could use?

    python -m benchmarks.feed [--rounds 5] [--seconds 3] [--only images] [--out benchmarks/results]

Every contender delivers shuffled batches of 256 rows as torch tensors to 1 consumer process, and to 2 that get a half each. A
round measures all of them one after the other; ratios are taken to the limit of the same round, and the median over rounds
counts. In the first round one whole epoch is checked: every row comes exactly once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contenders import CONTENDERS
from benchmarks.feed_data import TABLES, Rows, arrays
from benchmarks.machine import describe
from benchmarks.outcome import options_parser, save
from benchmarks.ray_contenders import RAY_CONTENDERS, measure_ray

VERSIONS = ("numpy", "torch", "pyarrow", "ray", "torchdata", "datasets", "pylance", "grain", "litdata", "webdataset")
CONSUMERS = (1, 2)
NOT_ON_TABLE = ("WebDataset",)
"""A tar member per row of 112 bytes is nobody's use of it."""


def main() -> None:
    """Measure, and write `feed.json`."""
    parser = options_parser(5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", choices=sorted(TABLES))
    parser.add_argument("--match", default="", help="only contenders whose name holds this text, and the limit")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe(VERSIONS), "rounds": options.rounds, "seconds": options.seconds, "tables": {}}
    for name in [options.only] if options.only else TABLES:
        result["tables"][name] = _measure_table(TABLES[name], options)
    save(options.out, "feed", result)


def _measure_table(rows: Rows, options: argparse.Namespace) -> dict[str, Any]:
    home = options.data / rows.name
    arrays(rows, home / "arrays")
    names = [*CONTENDERS, *RAY_CONTENDERS]
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
                    "of_limit": statistics.median(rate / one for rate, one in zip(rates, base[world], strict=True)),
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
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(world), context.Queue()
    consumers = [
        context.Process(target=_consume, args=(name, rows.name, str(home), rank, world, seconds, check, barrier, answers))
        for rank in range(world)
    ]
    for consumer in consumers:
        consumer.start()
    got = [answers.get(timeout=1800) for _ in consumers]
    for consumer in consumers:
        consumer.join()
    failed = [answer for answer in got if isinstance(answer, str)]
    if failed:
        raise RuntimeError(failed[0])
    if check:
        seen = np.concatenate([numbers for _, numbers in got])
        if len(seen) != rows.rows or not np.array_equal(np.sort(seen), np.arange(rows.rows)):
            raise RuntimeError(f"an epoch held {len(seen):,} rows, {len(np.unique(seen)):,} different ones, of {rows.rows:,}")
    return float(sum(rate for rate, _ in got))


def _consume(
    name: str, table: str, home: str, rank: int, world: int, seconds: float, check: bool, barrier: Any, answers: Any
) -> None:
    """One consumer process: check an epoch, then count rows for `seconds`."""
    try:
        rows, contender = TABLES[table], CONTENDERS[name]
        # As torchrun and Ray Train do: processes that share the cores and start a thread on each stand in each other's way.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
        folder = Path(home, contender.folder)
        if rank:
            barrier.wait(1800)  # the first one writes the format
        warm = contender.batches(rows, folder, rank, world, 0)
        first = next(warm)[1].numpy().copy()
        if not rank and world > 1:
            barrier.wait(1800)
        numbers = np.concatenate([first, *(label.numpy().copy() for _, label in warm)]) if check else None
        barrier.wait(1800)
        count, epoch, began, deadline = 0, 1, 0.0, float("inf")
        while time.perf_counter() < deadline:
            for _, label in contender.batches(rows, folder, rank, world, epoch):
                if not began:  # the start of the first epoch is not timed
                    began = time.perf_counter()
                    deadline = began + seconds
                    continue
                count += len(label)
                if time.perf_counter() >= deadline:
                    break
            epoch += 1
        answers.put((count / (time.perf_counter() - began), numbers))
    except BaseException as error:
        barrier.abort()
        answers.put(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
