"""What does a batch hold of a column of lists? Padded rows and their lengths, or all entries and where each row begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingest.dataset import ColumnInfo

__all__ = ["Packed", "batch_rows_of", "cut_lists", "from_padded", "is_packed", "padded_of"]


class Packed(NamedTuple):
    """Lists of several rows, one after the other."""

    values: Tensor
    """[entries of all rows]."""
    offsets: NDArray[np.int64]
    """int64 [rows + 1]."""


def cut_lists(info: ColumnInfo, packed: Packed, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
    """Cut the lists of several batches apart, each padded or packed as the column says.

    Args:
        sizes: rows of each batch; together those of `packed`.

    Returns:
        For each batch the column and its companion, as `ColumnInfo.ragged` describes them.
    """
    batches = []
    begin = 0
    for size in sizes:
        offsets = packed.offsets[begin : begin + size + 1]
        values = packed.values[int(offsets[0]) : int(offsets[-1])]
        begin += size
        if info.ragged == "packed":
            batches.append({info.name: values, str(info.companion): torch.from_numpy(offsets - offsets[0])})
            continue
        lengths = torch.from_numpy(np.diff(offsets))
        longest = int(lengths.max()) if size else 0
        padded = torch.full((size, longest), info.pad_value, dtype=values.dtype)
        padded[torch.arange(longest) < lengths[:, None]] = values
        batches.append({info.name: padded, str(info.companion): lengths})
    return batches


def from_padded(info: ColumnInfo, padded: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """A batch's tensors of a column of lists, out of `padded` [rows, longest] and `lengths`, int64 [rows]."""
    values = padded[torch.arange(padded.shape[1]) < lengths[:, None]]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths.numpy())])
    return cut_lists(info, Packed(values, offsets), [len(lengths)])[0]


def padded_of(info: ColumnInfo, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A column of lists out of a batch of either form: `name` [rows, longest] and `name_length`, int64 [rows]."""
    if info.ragged == "padded":
        return {name: columns[name] for name in (info.name, str(info.companion))}
    offsets = columns[str(info.companion)].numpy()
    return cut_lists(info.model_copy(update={"ragged": "padded"}), Packed(columns[info.name], offsets), [len(offsets) - 1])[0]


def is_packed(columns: Mapping[str, Tensor], name: str) -> bool:
    """Whether a batch holds column `name` packed, or `name` is the offsets of one that is."""
    return f"{name}_offsets" in columns or (name.endswith("_offsets") and name.removesuffix("_offsets") in columns)


def batch_rows_of(columns: Mapping[str, Tensor], low: int, high: int) -> dict[str, Tensor]:
    """Rows [low, high) of a batch's columns, packed ones included."""
    part = {}
    for name, column in columns.items():
        offsets = columns.get(f"{name}_offsets")
        if offsets is not None:
            part[name] = column[int(offsets[low]) : int(offsets[high])]
        elif is_packed(columns, name):
            part[name] = column[low : high + 1] - column[low]
        else:
            part[name] = column[low:high]
    return part
