"""How does a batch hold a column of lists? As padded rows and their lengths, or as all entries and the offsets of the rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ingest.schema import ColumnInfo

__all__ = ["Packed", "batch_rows_of", "cut_lists", "packed_problem"]


class Packed(NamedTuple):
    """Concatenated lists of several rows."""

    values: Tensor
    """[entries of all rows]."""
    offsets: NDArray[np.int64]
    """int64 [rows + 1]."""


def cut_lists(info: ColumnInfo, packed: Packed, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Cut the lists of several batches apart, padded or packed as `ColumnInfo.ragged` describes.

    Args:
        sizes: rows of each batch; their sum is the rows of `packed`.

    Returns:
        The column and its companion, by batch.
    """
    batches = []
    begin = 0
    for size in sizes:
        offsets = packed.offsets[begin : begin + size + 1]
        values = packed.values[int(offsets[0]) : int(offsets[-1])].data  # own version counter, see `gathered`
        begin += size
        if info.ragged == "packed":
            batches.append({info.name: values, str(info.companion): torch.from_numpy(offsets - offsets[0])})
            continue
        lengths = np.diff(offsets)
        longest = int(lengths.max(initial=0))
        padded = np.full((size, longest), info.pad_value, values.numpy().dtype)  # torch cannot fill unsigned integers
        padded[np.arange(longest) < lengths[:, None]] = values.numpy()
        batches.append({info.name: torch.from_numpy(padded), str(info.companion): torch.from_numpy(lengths)})
    return batches


def batch_rows_of(columns: Mapping[str, Tensor], low: int, high: int, packed: Collection[str]) -> dict[str, Tensor]:
    """Select rows [low, high) of a batch's columns; the columns named in `packed` are packed lists."""
    part = {name: column[low:high] for name, column in columns.items()}
    for name in packed:
        offsets = columns.get(f"{name}_offsets")
        if name in columns and offsets is not None:
            part[name] = columns[name][int(offsets[low]) : int(offsets[high])]
            part[f"{name}_offsets"] = offsets[low : high + 1] - offsets[low]
    return part


def packed_problem(columns: Mapping[str, Tensor], name: str, rows: int) -> str | None:
    """Describe the error of a packed column of a batch of `rows` rows; None if it is right or absent."""
    values, offsets = columns.get(name), columns.get(f"{name}_offsets")
    if values is None and offsets is None:
        return None
    if values is None or offsets is None or offsets.shape != (rows + 1,):
        return f"packed column {name!r} needs {name + '_offsets'!r}, int64 of shape [{rows + 1}]"
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets.diff() < 0).any()):
        return f"{name + '_offsets'!r} must rise from 0 to the {len(values)} entries of {name!r}"
    return None
