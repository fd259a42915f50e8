"""Where do the splits of each class of a file end, so that their shares in it are exact? For rules with `stratify`.

Of a class with n rows in a file, the parts end after n times their share, rounded up or down by a draw of the file's name and
the class: over many files the shares are right, and in each they are as near as whole rows can be. Rows come in the order of
their hash, so which these are depends on nothing but the rows of the file that are of the class.
"""

from __future__ import annotations

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.formats.registry import reader_of
from penstock.ingest.ray_tasks import ParallelMap
from penstock.ingest.read.row_hash import unit_interval
from penstock.ingest.read.snapshot import SourceSnapshot, iterate_rows
from penstock.ingest.read.splits import Deal, class_hashes, deals, hash_positions, split_codes
from penstock.ingest.schema import SPLITS
from penstock.ingest.spec import DataSpec, SplitRule

__all__ = ["with_strata"]

_MAX_CLASSES = 10_000

_BATCH_ROWS = 65536


def with_strata(data: DataSpec, snapshot: SourceSnapshot, parallel: ParallelMap | None = None) -> SourceSnapshot:
    """Return the snapshot with the strata of its train files, if a rule asks for them. Reads each of these files once.

    Args:
        parallel: where they are read, a file at a time; None for threads of this process. 16 bytes a row of a file are held.

    Raises:
        DataError: the column has too many values to be one of classes; or as `iterate_rows`.
    """
    deal = next((deal for deal in deals(data) if deal.rule.stratify is not None), None)
    if deal is None or reader_of(data, snapshot.format).one_row_per_file:
        return snapshot
    train = [file for file in snapshot.files if file.location == "train"]
    dealt = partial(_with_strata, data, deal, snapshot.model_copy(update={"files": ()}))
    with ThreadPoolExecutor(os.cpu_count() or 1, "penstock-strata") as pool:
        found = {file.uri: file for file in (pool.map(dealt, train) if parallel is None else parallel(dealt, train))}
    files = tuple(found[file.uri] if file.location == "train" else file for file in snapshot.files)
    return snapshot.model_copy(update={"files": files})


def _with_strata(data: DataSpec, deal: Deal, snapshot: SourceSnapshot, file: SourceFile) -> SourceFile:
    column, hashes, classes = deal.rule.stratify or "", [np.zeros(0)], [np.zeros(0, np.uint64)]
    by_time = isinstance(data.test, SplitRule) and data.test.is_by_time
    only_test = data.model_copy(update={"validation": None})
    for batch in iterate_rows(data, snapshot, [file], _BATCH_ROWS):
        table = batch.table
        if by_time:  # rows of the test split do not count for the shares
            table = table.filter(pa.array(split_codes(only_test, table, batch.files) == SPLITS.index("train")))
        hashes.append(hash_positions(data, table, batch.files, deal))
        classes.append(class_hashes(data, table, column))
    positions, of_class = np.concatenate(hashes), np.concatenate(classes)
    values = np.unique(of_class)
    if len(values) > _MAX_CLASSES:
        raise DataError(
            f"data.{deal.split}.stratify: {file.uri} has {len(values):,} values of {column!r}, which is not a class column",
            next_step=f"stratify by a column of at most {_MAX_CLASSES:,} classes",
        )
    strata = {str(value): _ends(np.sort(positions[of_class == value]), deal, file.name, value) for value in values.tolist()}
    return file.model_copy(update={"strata": strata})


def _ends(positions: np.ndarray, deal: Deal, name: str, value: int) -> tuple[float, ...]:
    """Return the last hash of each part but the last one; -1 for a part that begins the range and is empty."""
    draw = hashlib.blake2b(f"{name}\0{value}".encode(), digest_size=8).digest()
    rounding = float(unit_interval(np.frombuffer(draw, "<u8"))[0])
    counts = [min(len(positions), math.floor(end * len(positions) + rounding)) for end in deal.ends]
    return tuple(float(positions[count - 1]) if count else -1.0 for count in counts)
