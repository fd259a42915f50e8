"""How well does an order mix, compared with a full shuffle, in the worst case that neighbouring rows are alike?"""

from __future__ import annotations

import numpy as np

from penstock.ingest.shuffle.order import Order

__all__ = ["chi2_by_freedom"]

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
