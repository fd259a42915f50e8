"""The feeds the conformance suite runs over, all on the same 1,003 rows, and what those rows hold."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from PIL import Image
from torch import Tensor

from penstock.digest import file_digest
from penstock.ingest.columns.arrays import column_view, contiguous, tensor_array
from penstock.ingest.columns.extension_types import ImageType, RaggedType
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.cursor import Feed
from penstock.ingest.manifest import DatasetManifest, ShardInfo, ShardTable
from penstock.ingest.materialize.shard_file import with_provenance, write_shard
from penstock.ingest.materialize.without_disk import MemoryDataset
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.ingest.shuffle.order import Order, make_order
from penstock.ingest.spec import LengthSpec, ShuffleSpec
from penstock.storage import Storage

ROWS = 1003
BATCH_ROWS = 64
UNIT_ROWS = (90, 1, 120, 77, 33, 101, 64, 20, 119, 8, 100, 31, 110, 50, 79)
"""Rows of the units of a stream with lanes."""

SCHEMA = FeedSchema(
    columns=(
        ColumnInfo(name="x", dtype="float32", shape=(5,)),
        ColumnInfo(name="image", dtype="uint8", shape=(2, 3)),
        ColumnInfo(name="label", dtype="int64"),
    ),
    label="label",
    num_classes=7,
)


LISTS = SCHEMA.model_copy(
    update={
        "columns": (
            *SCHEMA.columns,
            ColumnInfo(name="tokens", dtype="int32", ragged="padded", pad_value=-1),
            ColumnInfo(name="marks", dtype="float32", ragged="packed"),
            ColumnInfo(name="picture", dtype="uint8", shape=(2, 3, 3), encoded=True),
        )
    }
)
"""The same rows with lists: row i has the `tokens` i, i + 1, ... (as many as i % 7), i % 3 `marks` of i, and an encoded
`picture` all of i % 251."""


def values_of(ids: np.ndarray) -> dict[str, np.ndarray]:
    """What the rows with these numbers hold; `x` alone tells them apart."""
    return {
        "x": (ids[:, None] * 8 + np.arange(5)).astype(np.float32),
        "image": ((ids[:, None] * 6 + np.arange(6)) % 251).astype(np.uint8).reshape(-1, 2, 3),
        "label": ids % 7,
    }


def tables(rows: int = ROWS, cuts: int = 150) -> Iterator[pa.Table]:
    """The rows as prepared tables of uneven sizes."""
    for start in range(0, rows, cuts):
        yield table(np.arange(start, min(start + cuts, rows)))


def table(ids: np.ndarray) -> pa.Table:
    """Those rows as one prepared table."""
    return pa.table({name: tensor_array(values) for name, values in values_of(ids).items()})


def put_dataset(block_rows: int = 200, rows: int = ROWS, *, lists: bool = False) -> MemoryDataset:
    """Put the rows into Ray's object store, `block_rows` in each object."""
    parts = [np.arange(start, min(start + block_rows, rows)) for start in range(0, rows, block_rows)]
    prepared = [(lists_table if lists else table)(ids) for ids in parts]
    return MemoryDataset(
        schema=LISTS if lists else SCHEMA,
        split="train",
        blocks=tuple(
            ray.put({name: column_view(contiguous(t.column(name))).copy() for name in t.column_names}) for t in prepared
        ),
        block_rows=tuple(len(ids) for ids in parts),
        size_bytes=sum(t.nbytes for t in prepared),
        content=f"{rows} rows",
    )


def lists_table(ids: np.ndarray) -> pa.Table:
    """Those rows with their lists and pictures."""
    made = table(ids)
    tokens, marks = ([list(range(i, i + i % 7)) for i in ids.tolist()], [[float(i)] * (i % 3) for i in ids.tolist()])
    for name, lists in (("tokens", tokens), ("marks", marks)):
        info = LISTS[name]
        kind = RaggedType(pa.from_numpy_dtype(info.dtype), info.ragged or "padded", info.pad_value)
        made = made.append_column(name, pa.ExtensionArray.from_storage(kind, pa.array(lists, kind.storage_type)))
    images = pa.array([_png(i % 251) for i in ids.tolist()], pa.large_binary())
    return made.append_column("picture", pa.ExtensionArray.from_storage(ImageType((2, 3, 3)), images))


@functools.cache
def _png(value: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((2, 3, 3), value, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def write_dataset(
    storage: Storage, scratch: Path, num_shards: int, rows: int = ROWS, *, lists: bool = False
) -> DatasetManifest:
    """Put the rows into a storage as a cached dataset of `num_shards` shards of uneven sizes."""
    shards = []
    for number, (start, stop) in enumerate(pairwise(_edges(num_shards, rows))):
        ids = np.arange(start, stop)
        local = scratch / f"{number}.arrow"
        scratch.mkdir(parents=True, exist_ok=True)
        write_shard(local, [with_provenance((lists_table if lists else table)(ids), np.zeros(len(ids)), ids)])
        path = f"units/u/train-{number:05d}.arrow"
        size, digest = local.stat().st_size, file_digest(local)
        storage.put_file(local, path)
        shards.append(ShardInfo(path=path, split="train", rows=len(ids), size_bytes=size, digest=digest, unit="u"))
    return DatasetManifest(
        key="k", feed_schema=LISTS if lists else SCHEMA, rows={"train": rows}, table=ShardTable.of(shards), content_digest="c"
    )


def _edges(num_shards: int, rows: int = ROWS) -> list[int]:
    bounds = np.linspace(0, 1, num_shards + 1) ** 1.5 * rows
    return np.unique(np.round(bounds).astype(int)).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """How one kind of feed is opened: `open(rank=..., world_size=..., batch_rows=..., seed=..., prefetch=...)`."""

    name: str
    open: Callable[..., Feed]
    shuffles: bool


@dataclass(frozen=True)
class Opener:
    """Opens the rows for a rank: `open_as` makes a feed of them, given an order."""

    open_as: Callable[..., Feed]
    mode: str
    by_length: LengthSpec | None = None

    def __call__(self, *, seed: int = 3, **place: Any) -> Feed:
        order = order_of(self.mode, seed).model_copy(update={"by_length": self.by_length})
        return self.open_as(order=order, **{"batch_rows": BATCH_ROWS, **place})


def order_of(mode: str, seed: int) -> Order:
    """An order whose windows end inside batches; `global8` has 8 lanes of 5 shards, `units8` of the units of a stream."""
    if mode == "units8":
        spec = ShuffleSpec(mode="windowed", window_rows=150, lanes=8, seed=seed)
        return make_order(spec, ROWS, UNIT_ROWS, unit_bytes=UNIT_ROWS)
    if mode.endswith("8"):
        spec = {"mode": "windowed", "window_of": mode[:-1], "window_rows": 150} if mode[:-1] != "global" else {}
        shards = [stop - start for start, stop in pairwise(_edges(5))]
        return make_order(ShuffleSpec.model_validate({**spec, "lanes": 8, "seed": seed}), ROWS, shards)
    return Order(mode=mode, seed=seed, rows=ROWS, window_rows=150 if mode == "windowed" else 0)  # type: ignore[arg-type]


def check_values(batch: Batch) -> None:
    """Every tensor holds what its row ids say, in the stored dtype."""
    expected = values_of(batch.row_ids)
    columns = dict(batch.columns)
    if "tokens" in columns:
        lists = [columns.pop(name) for name in ("tokens", "tokens_length", "marks", "marks_offsets")]
        _check_lists(batch.row_ids, *lists)
        picture = columns.pop("picture")
        assert picture.shape == (batch.rows, 2, 3, 3)
        assert (picture.numpy() == (batch.row_ids % 251)[:, None, None, None]).all()
    assert set(columns) == set(expected)
    for name, tensor in columns.items():
        assert tensor.numpy().dtype == np.dtype(SCHEMA[name].dtype)
        np.testing.assert_array_equal(tensor.numpy(), expected[name])


def _check_lists(ids: np.ndarray, tokens: Tensor, length: Tensor, marks: Tensor, offsets: Tensor) -> None:
    assert length.tolist() == (ids % 7).tolist()
    longest = tokens.shape[1]
    assert tokens.tolist() == [list(range(i, i + i % 7)) + [-1] * (longest - i % 7) for i in ids.tolist()]
    assert offsets.tolist() == [0, *np.cumsum(ids % 3).tolist()]
    assert marks.tolist() == [i for i in ids.tolist() for _ in range(i % 3)]
