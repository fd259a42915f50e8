"""Gathering: rows of any dtype and length, wherever their blocks lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.ingest.feed.gather import RowGather
from penstock.ingest.schema import ColumnInfo


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bool"]
)
def test_every_dtype_arrives_as_stored(dtype: str) -> None:
    blocks = [np.arange(first, first + 10).astype(dtype).reshape(10, 1) for first in (0, 10)]
    rows = RowGather([ColumnInfo(name="v", dtype=dtype, shape=(1,))], [10, 10], lambda index: {"v": blocks[index]})
    tensor = rows.take(np.array([19, 0, 10, 9]))["v"]
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tensor.numpy().ravel().tolist() == np.array([19, 0, 10, 9]).astype(dtype).tolist()


@pytest.mark.parametrize("sizes", [[1, 700, 3, 0, 296], [250] * 4, [1000], [0, 1000, 0], [*[1] * 90, 910], [999, 1]])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float32", (3,)), ("int64", ()), ("float16", (2,)), ("uint8", ()), ("float64", (300,)), ("uint8", (1500,))],
)
def test_gathering_from_many_blocks_equals_plain_indexing(sizes: list[int], dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    data = (rng.random((1000, *shape)) * 200).astype(dtype)
    ends = np.cumsum(sizes)
    blocks = [data[end - size : end].copy() for end, size in zip(ends, sizes, strict=True)]
    rows = RowGather([ColumnInfo(name="v", dtype=dtype, shape=shape)], sizes, lambda i: {"v": blocks[i]})
    assert np.array_equal(rows.column("v"), data)  # opens all, those without rows too
    for ids in (rng.integers(0, 1000, 500), np.arange(1000), np.array([999]), np.array([], np.int64), np.full(5, 704)):
        assert torch.equal(rows.take(ids)["v"], torch.from_numpy(data[ids]))


def test_numbers_at_any_address_are_gathered() -> None:
    """As another program's file may have them: numbers that do not lie at multiples of their size."""
    data = np.arange(40, dtype=np.float64)
    blocks = [np.frombuffer(b"." * shift + data[20 * shift :][:20].tobytes(), np.uint8)[shift:].view("f8") for shift in (0, 1)]
    assert not blocks[1].flags.aligned
    rows = RowGather([ColumnInfo(name="v", dtype="float64")], [20, 20], lambda i: {"v": blocks[i]})
    for _ in range(2):
        assert rows.take(np.array([39, 0, 20, 19]))["v"].tolist() == [39.0, 0.0, 20.0, 19.0]


def test_rows_are_found_after_block_is_reopened() -> None:
    opened: list[np.ndarray] = []

    def block(index: int) -> dict[str, np.ndarray]:
        opened.append(np.arange(10 * index, 10 * index + 10))  # elsewhere each time: all are kept
        return {"v": opened[-1]}

    rows = RowGather([ColumnInfo(name="v", dtype="int64")], [10] * 3, block, [80] * 3)
    for _ in range(3):
        assert rows.take(np.array([29, 0, 15]))["v"].tolist() == [29, 0, 15]
        assert rows.take(np.array([1, 28, 11]))["v"].tolist() == [1, 28, 11]
        rows.close_before(20)
        for old in opened:
            if old[0] < 20:
                old[:] = -1
    assert len(opened) == 7


def test_memory_is_reused_once_unreferenced() -> None:
    data = np.arange(60, dtype=np.int64)
    rows = RowGather([ColumnInfo(name="v", dtype="int64")], [30, 30], lambda block: {"v": data[30 * block : 30 * block + 30]})
    kept_as_array = rows.take(np.arange(20, 40))["v"].split(10)[1].numpy()  # the only thing that is left of the first piece
    held = [rows.take(np.arange(first, first + 20))["v"] for first in (0, 40)]
    assert kept_as_array.tolist() == list(range(30, 40))
    assert [tensor.tolist() for tensor in held] == [list(range(20)), list(range(40, 60))]
    addresses = {tensor.data_ptr() for tensor in held}
    del held
    assert rows.take(np.arange(5))["v"].data_ptr() in addresses
    assert rows.take(np.arange(60))["v"].tolist() == list(range(60)), "a longer piece than any before"
