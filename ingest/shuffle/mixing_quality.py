"""How well does an order mix, compared with a full shuffle?

In the worst case neighbouring rows are alike (sorted by label, by day, by source). A batch then represents the split only as
well as some smaller number of rows drawn from the whole split, which follows from the probability that two rows of a batch come
from one run of stored rows.
"""

from __future__ import annotations

import numpy as np

from penstock.ingest.shuffle.order import GROUPS_PER_WINDOW, Order
from penstock.ingest.spec import ShuffleSpec

__all__ = ["chi2_by_freedom", "mixes_like", "window_runs"]

_CLASSES, _BATCHES = 100, 64


def chi2_by_freedom(order: Order, batch_rows: int) -> float | None:
    """Return chi2 of classes in batches, by its degrees of freedom, if stored rows were sorted into 100 equal classes.

    1 is a full shuffle; below, batches are more even; above, less. Counted over batches from all over epoch 0. None if rows are
    drawn or put into steps by length, or do not make two batches.
    """
    batches = order.rows // batch_rows
    if order.is_drawn or order.by_length is not None or batches < 2:
        return None
    expected, found = batch_rows / _CLASSES, []
    for number in sorted({each * batches // _BATCHES for each in range(_BATCHES)}):
        ids = order.ids(0, number * batch_rows, (number + 1) * batch_rows)
        counts = np.bincount(ids * _CLASSES // order.rows, minlength=_CLASSES)
        found.append(((counts - expected) ** 2 / expected).sum() / (_CLASSES - 1))
    return float(np.mean(found))


def window_runs(shuffle: ShuffleSpec, order: Order | None, *, streamed: bool) -> float:
    """Return the number of runs of neighbouring rows in one window of `windowed`.

    Args:
        order: of the split if known: windows of whole shards depend on the number of shards.
        streamed: a window is the next rows of a stream (`materialize.cache: none`).
    """
    if streamed:
        return 1.0
    if order is None:
        return float(GROUPS_PER_WINDOW) if shuffle.window_of == "rows" else 1.0
    if count := order.shards.count:
        return min(count, max(1.0, shuffle.window_rows * count / order.rows))
    return min(float(GROUPS_PER_WINDOW), order.rows / order.group_rows)


def mixes_like(batch_rows: int, runs: float, window_rows: float, rows: float = float("inf")) -> float:
    """Return how many rows drawn from the whole split equal a batch of a window, if neighbours are alike: 1 to `batch_rows`.

    Args:
        runs: of neighbouring rows in a window.
        window_rows: rows of a window.
        rows: of the split.
    """
    if window_rows >= rows:
        return float(min(batch_rows, rows))
    windows = max(1.0, batch_rows / window_rows)  # that one batch goes through
    runs, window_rows = runs * windows, window_rows * windows
    run_rows = window_rows / runs
    together = (run_rows - 1) / max(1.0, window_rows - 1)
    # Rows of one run deviate alike from the split's mean, and rows of different runs slightly in opposite directions.
    correlation = together - (1 - together) / max(1.0, rows / run_rows - 1)
    return 1 / (1 / batch_rows + (1 - 1 / batch_rows) * max(0.0, correlation))
