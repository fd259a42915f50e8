"""What does a batch hold of a column of lists? Padded rows and their lengths, or all entries and where each row begins."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ingest.schema import ColumnInfo

__all__ = ["Packed", "batch_rows_of", "cut_lists", "from_padded", "packed_problem", "padded_of"]


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
        values = packed.values[int(offsets[0]) : int(offsets[-1])].data  # counts its changes alone, see `feed.gathered`
        begin += size
        if info.ragged == "packed":
            batches.append({info.name: values, str(info.companion): torch.from_numpy(offsets - offsets[0])})
            continue
        lengths = np.diff(offsets)
        longest = int(lengths.max(initial=0))
        padded = np.full((size, longest), info.pad_value, values.numpy().dtype)  # torch fills no unsigned integers
        padded[np.arange(longest) < lengths[:, None]] = values.numpy()
        batches.append({info.name: torch.from_numpy(padded), str(info.companion): torch.from_numpy(lengths)})
    return batches


def from_padded(info: ColumnInfo, padded: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """A batch's tensors of a column of lists, out of `padded` [rows, longest] and `lengths`, int64 [rows]."""
    values = padded.numpy()[np.arange(padded.shape[1]) < lengths.numpy()[:, None]]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths.numpy())])
    return cut_lists(info, Packed(torch.from_numpy(values), offsets), [len(lengths)])[0]


def padded_of(info: ColumnInfo, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A column of lists out of a batch of either form: `name` [rows, longest] and `name_length`, int64 [rows]."""
    if info.ragged == "padded":
        return {name: columns[name] for name in (info.name, str(info.companion))}
    offsets = columns[str(info.companion)].numpy()
    return cut_lists(info.model_copy(update={"ragged": "padded"}), Packed(columns[info.name], offsets), [len(offsets) - 1])[0]


def batch_rows_of(columns: Mapping[str, Tensor], low: int, high: int, packed: Collection[str]) -> dict[str, Tensor]:
    """Rows [low, high) of a batch's columns, of which those named in `packed` are lists, one after the other."""
    part = {name: column[low:high] for name, column in columns.items()}
    for name in packed:
        offsets = columns.get(f"{name}_offsets")
        if name in columns and offsets is not None:
            part[name] = columns[name][int(offsets[low]) : int(offsets[high])]
            part[f"{name}_offsets"] = offsets[low : high + 1] - offsets[low]
    return part


def packed_problem(columns: Mapping[str, Tensor], name: str, rows: int) -> str | None:
    """What is wrong with a packed column of a batch of `rows` rows; None if nothing is, or if it is not there."""
    values, offsets = columns.get(name), columns.get(f"{name}_offsets")
    if values is None and offsets is None:
        return None
    if values is None or offsets is None or offsets.shape != (rows + 1,):
        return f"column {name!r} is packed: it goes with {name + '_offsets'!r}, int64 of shape [{rows + 1}]"
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(values) or bool((offsets.diff() < 0).any()):
        return f"{name + '_offsets'!r} must rise from 0 to the {len(values)} entries of {name!r}"
    return None
