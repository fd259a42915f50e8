"""How are rows of unequal length gathered, and how does a batch hold them?

Lists are copied by pyarrow from several blocks, images decoded by several threads. A batch has padded rows and their lengths,
or all entries and the offsets of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from penstock.errors import DataError
from penstock.ingest.columns.extension_types import Variable
from penstock.ingest.columns.images import decode_image
from penstock.ingest.schema import ColumnInfo

__all__ = [
    "ImageDecoder",
    "Packed",
    "Places",
    "batch_rows_of",
    "bytes_at",
    "cut_lists",
    "packed_problem",
    "places_of",
    "take_lists",
]

Ids = NDArray[np.int64]


class Packed(NamedTuple):
    """Concatenated lists of several rows."""

    values: Tensor
    """[entries of all rows]."""
    offsets: NDArray[np.int64]
    """int64 [rows + 1]."""


class Places(NamedTuple):
    """Places of the entries of rows in this process's memory."""

    first: int
    """Address of the lowest view."""
    size: int
    """Bytes from there to the end of the highest view. The gaps between views are never read."""
    starts: Ids
    """int64 [rows]: bytes from `first` to a row's first entry."""
    lengths: Ids
    """int64 [rows]: entries of a row."""
    dtype: np.dtype
    held: Sequence[object]
    """Objects that keep the memory alive."""


def places_of(views: Mapping[int, Variable], dtype: str, blocks: Ids, local: Ids) -> Places:
    """Find rows in the views of several blocks.

    Args:
        views: by block.
        blocks: int64 [rows], the block of each row.
        local: int64 [rows], the row's number in its block.
    """
    kind = np.dtype(dtype)
    begins = {block: view.values.ctypes.data for block, view in views.items()}
    first = min(begins.values())
    end = max(begin + views[block].values.nbytes for block, begin in begins.items())
    starts, lengths = np.empty(len(local), np.int64), np.empty(len(local), np.int64)
    by_block = np.argsort(blocks, kind="stable")
    edges = np.searchsorted(blocks[by_block], list(views))
    for block, rows in zip(views, np.split(by_block, edges[1:]), strict=True):
        offsets = views[block].offsets
        begin = offsets[local[rows]]
        lengths[rows] = offsets[local[rows] + 1] - begin
        starts[rows] = begin * kind.itemsize + (begins[block] - first)
    return Places(first, end - first, starts, lengths, kind, list(views.values()))


def take_lists(places: Places) -> Packed:
    """Copy the entries of rows into one array, in the order of the rows."""
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(places.lengths)])
    if not offsets[-1]:
        return Packed(torch.from_numpy(np.empty(0, places.dtype)), offsets)
    kind = pa.from_numpy_dtype(places.dtype)
    entries = places.size // places.dtype.itemsize
    memory = pa.Array.from_buffers(kind, entries, [None, pa.foreign_buffer(places.first, places.size, places.held)])
    lists = pa.LargeListViewArray.from_arrays(
        pa.array(places.starts // places.dtype.itemsize), pa.array(places.lengths), memory
    )
    flat = lists.flatten()
    values = np.frombuffer(flat.buffers()[1], places.dtype)[flat.offset : flat.offset + len(flat)]
    # pyarrow returns a single row as a view of the shard: the caller needs a copy.
    return Packed(torch.from_numpy(values if values.flags.writeable else values.copy()), offsets)


class _ArrayInterface:
    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": (address, False)}


def bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    """View the bytes at an address; the caller keeps that memory alive. ctypes would create a type for each size."""
    return np.asarray(_ArrayInterface(address, size))


class ImageDecoder:
    """Decodes images in as many threads as torch has in this process; Pillow releases the GIL."""

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="penstock-decode")

    def decode(self, info: ColumnInfo, places: Places, out: Tensor) -> None:
        """Decode images into `out`, uint8 [rows, *info.shape].

        Raises:
            DataError: an image cannot be decoded, although it was when it was prepared.
        """
        memory = bytes_at(places.first, places.size)
        height, width, channels = info.shape
        pixels = out.numpy()

        def work(row: int) -> None:
            start = places.starts[row]
            content = memory[start : start + places.lengths[row]].data
            try:
                decode_image(content, (height, width), "RGB" if channels == 3 else "L", out=pixels[row], is_whole=True)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise DataError(f"an image in column {info.name!r} cannot be decoded any more: {error}") from error

        if torch.get_num_threads() == 1 or len(pixels) == 1:
            for row in range(len(pixels)):
                work(row)
        else:
            list(self._threads.map(work, range(len(pixels))))


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
