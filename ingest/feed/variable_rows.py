"""How are rows of unequal length gathered? Lists are copied by pyarrow, images decoded by several threads."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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
from penstock.ingest.feed.lists import Packed
from penstock.ingest.schema import ColumnInfo

__all__ = ["ImageDecoder", "Places", "places_of", "take_lists"]


Ids = NDArray[np.int64]


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
