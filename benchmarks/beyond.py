"""What happens when the rows do not fit into memory?

    python -m benchmarks.beyond [--rounds 3] [--seconds 5] [--out benchmarks/results]

500,000 rows of uint8[32,32,3] and a label, 1.5 GB on the local disk, read by one process that may have 512 MB for itself and
all pages it reads (a memory cgroup; where none can be made, nothing is measured). Each variant starts with nothing of the rows
in memory, and a round measures all of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.loaders.cached_dataset import manifest
from benchmarks.loaders.contenders import numpy_gather, penstock_feed
from benchmarks.loaders.feed_data import Rows, arrays
from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, rows_per_s, save

ROWS = Rows("beyond", 500_000, "uint8", (32, 32, 3))
LIMIT_BYTES = 512 << 20
VARIANTS = {
    "numpy gather of random rows": ("numpy", 0),
    "penstock, global": ("global", 0),
    "penstock, windowed, 65,536 rows": ("windowed", 1 << 16),
    "penstock, windowed, 16,384 rows": ("windowed", 1 << 14),
    "penstock, as stored": ("none", 0),
}
VERSIONS = ("numpy", "torch", "pyarrow")


def main() -> None:
    """Measure, and write `beyond.json`."""
    parser = options_parser(3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant is not None:
        print(_rate(*VARIANTS[options.variant], options.data / "beyond", options.seconds))
        return
    group = Path("/sys/fs/cgroup/memory", f"penstock-bench-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        print(f"beyond is left out: no memory cgroup (version 1) can be made here: {error}", file=sys.stderr)
        return
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        _write(options.data / "beyond")
        found = rows_per_s("beyond", VARIANTS, options.rounds, lambda name: _measure(name, group, options))
    finally:
        group.rmdir()
    result = {
        "machine": describe(VERSIONS),
        "rounds": options.rounds,
        "limit_mb": LIMIT_BYTES >> 20,
        "data_mb": sum(file.stat().st_size for file in (options.data / "beyond" / "penstock").rglob("*.arrow")) >> 20,
        "variants": beside_the_first(found, "rows_per_s"),
    }
    save(options.out, "beyond", result)


def _measure(name: str, group: Path, options: argparse.Namespace) -> float:
    for file in (options.data / "beyond").rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())  # only clean pages can be let go
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    words = ["--variant", name, "--seconds", str(options.seconds), "--data", str(options.data)]
    # The shell joins the group and becomes the process: all that it ever maps counts.
    joined = f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"'
    command = ["sh", "-c", joined, sys.executable, "-m", "benchmarks.beyond", *words]
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _write(home: Path) -> None:
    arrays(ROWS, home / "arrays")
    manifest(ROWS, home / "penstock")


def _rate(mode: str, window_rows: int, home: Path, seconds: float) -> float:
    """Rows per second of batches of 256, from the first row asked for."""
    if mode == "numpy":
        batches = numpy_gather(ROWS, home / "arrays", 0, 1, 0)
    else:
        batches = penstock_feed(ROWS, home / "penstock", 0, 1, 0, mode=mode, prefetch=2, window_rows=window_rows or 1 << 18)
    began, count = time.perf_counter(), 0
    for _, label in batches:
        count += len(label)
        if time.perf_counter() - began > seconds:
            break
    return count / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
