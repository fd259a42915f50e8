"""Does a batch take longer when there are more rows? From 10,000 to 100,000,000, in a global order.

    python -m benchmarks.growth [--rounds 5] [--seconds 1] [--out benchmarks/results]

For every number of rows: the time of a batch of 256 rows from the feed (one int64 column, so that 10^8 rows fit into memory),
and of the order alone, which is arithmetic. Rows lie in memory, in blocks of a million. A round measures every size; ratios are
taken to the smallest size of the same round.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine import describe
from benchmarks.outcome import options_parser, save
from penstock.ingest.feed.batch import FeedShare
from penstock.ingest.feed.cached import CachedFeed
from penstock.ingest.feed.gather import RowGather
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.ingest.shuffle.order import Order

SIZES = tuple(10**power for power in range(4, 9))
BATCH, BLOCK_ROWS = 256, 1 << 20
COLUMN = ColumnInfo(name="x", dtype="int64")


def main() -> None:
    """Measure, and write `growth.json`."""
    parser = options_parser(5)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    values = np.zeros(SIZES[-1], np.int64)
    values[:] = np.arange(SIZES[-1])  # real pages: the kernel gives one page of zeros to all that are only read
    found: dict[str, dict[int, list[float]]] = {name: {size: [] for size in SIZES} for name in ("feed", "order")}
    for number in range(options.rounds):
        for size in SIZES:
            order = Order(mode="global", seed=17, rows=size)
            found["order"][size].append(_per_batch(lambda epoch, order=order: _ids(order, epoch), options.seconds))  # type: ignore[misc]
            feed = _feed(values[:size], order)
            found["feed"][size].append(_per_batch(feed.batches, options.seconds))
            print(
                f"growth round {number + 1} {size:>11,} rows: {found['feed'][size][-1]:.1f} us a batch",
                file=sys.stderr,
                flush=True,
            )
    result = {
        "machine": describe(("numpy", "torch")),
        "rounds": options.rounds,
        "batch_rows": BATCH,
        "sizes": {
            str(size): {
                name: {
                    "us_per_batch": by_size[size],
                    "median": statistics.median(by_size[size]),
                    "of_smallest": statistics.median(
                        one / base for one, base in zip(by_size[size], by_size[SIZES[0]], strict=True)
                    ),
                }
                for name, by_size in found.items()
            }
            for size in SIZES
        },
    }
    save(options.out, "growth", result)


def _feed(values: np.ndarray, order: Order) -> CachedFeed:
    starts = range(0, len(values), BLOCK_ROWS)
    blocks = [{"x": values[start : start + BLOCK_ROWS]} for start in starts]
    rows = RowGather((COLUMN,), [len(block["x"]) for block in blocks], blocks.__getitem__)
    return CachedFeed(FeedSchema(columns=(COLUMN,)), "train", "growth", rows, order, FeedShare(BATCH))


def _ids(order: Order, epoch: int) -> Any:
    for start in range(0, order.rows, BATCH * 64):
        ids = order.ids(epoch, start, min(start + BATCH * 64, order.rows))
        yield from (ids[first : first + BATCH] for first in range(0, len(ids), BATCH))


def _per_batch(batches: Callable[[int], Any], seconds: float) -> float:
    """Microseconds, without the first batches."""
    count, epoch, began = 0, 0, 0.0
    while True:
        for batch in batches(epoch):
            if epoch == 0 and not began:
                began = time.perf_counter()
                continue
            count += len(batch) > 0
            if time.perf_counter() - began >= seconds:
                return (time.perf_counter() - began) / count * 1e6
        epoch += 1


if __name__ == "__main__":
    main()
