"""Rows that differ in length: lists padded and packed, steps by length, images that stay encoded."""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from penstock.errors import DataError, SpecError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.cached import CachedFeed, open_cached_feed
from penstock.ingest.feed.lists import batch_rows_of
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import MaterializeSpec, ShuffleSpec
from tests.ingest.preparing import Source, transform_table

ROWS, BATCH = 300, 32
STEPS = [
    {"ragged": {"columns": ["tokens"], "pad_value": -1}},
    {"ragged": {"columns": ["marks"], "batch": "packed"}},
    {"decode_image": {"column": "picture", "keep": "encoded"}},
    {"imputer": {"columns": ["age"], "strategy": "constant", "fill_value": 0.0}},
]


def png(row: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((6, 5, 3), row % 251, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def source_rows(ids: np.ndarray) -> pa.Table:
    """Row i has `i % 7` tokens and `i % 3` marks, both of which tell it apart; every fourth has no age."""
    rows = ids.tolist()
    return pa.table(
        {
            "id": ids,
            "tokens": pa.array([list(range(i, i + i % 7)) for i in rows], pa.list_(pa.int32())),
            "marks": pa.array([[i / 2] * (i % 3) for i in rows], pa.list_(pa.float32())),
            "picture": pa.array([{"bytes": png(i)} for i in rows]),
            "age": pa.array([None if i % 4 == 0 else float(i) for i in rows]),
        }
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, DatasetManifest]:
    """300 rows in three files, prepared into more than three shards."""
    source = Source.of(tmp_path_factory.mktemp("lists"), steps=STEPS)
    (source.folder / "train").mkdir()
    for number, ids in enumerate(np.split(np.arange(ROWS), 3)):
        pq.write_table(source_rows(ids), source.folder / "train" / f"{number}.parquet")
    manifest = source.materialize(spec=MaterializeSpec(unit_bytes=1, shard_bytes=8000))
    assert len(manifest.shards) > 3
    return source, manifest


@pytest.fixture
def opened(prepared: tuple[Source, DatasetManifest]) -> Callable[..., CachedFeed]:
    def open_it(rank: int = 0, world_size: int = 1, columns: list[str] | None = None, **shuffle: Any) -> CachedFeed:
        source, manifest = prepared
        order = make_order(ShuffleSpec.model_validate({"seed": 3, **shuffle}), ROWS)
        return open_cached_feed(
            [(source.storage, manifest)],
            "train",
            batch_rows=BATCH,
            order=order,
            rank=rank,
            world_size=world_size,
            columns=columns,
        )

    return open_it


def check(batch: Batch) -> None:
    """Every row holds what its number says."""
    ids, columns = batch.row_ids, batch.columns
    assert columns["id"].tolist() == ids.tolist()
    assert columns["tokens"].dtype == torch.int32
    assert columns["tokens_length"].tolist() == (ids % 7).tolist()
    assert columns["tokens"].shape == (len(ids), (ids % 7).max(initial=0))
    assert columns["marks_offsets"].tolist() == [0, *np.cumsum(ids % 3).tolist()]
    assert columns["picture"].shape == (len(ids), 6, 5, 3)
    assert columns["age"].tolist() == np.where(ids % 4, ids, 0).tolist()
    longest = columns["tokens"].shape[1]
    for row, i in enumerate(ids.tolist()):
        assert columns["tokens"][row].tolist() == list(range(i, i + i % 7)) + [-1] * (longest - i % 7)
        low, high = columns["marks_offsets"][row : row + 2].tolist()
        assert columns["marks"][low:high].tolist() == [i / 2] * (i % 3)
        assert (columns["picture"][row] == i % 251).all()


BY_TOKENS = {"by_length": {"column": "tokens", "pool_batches": 4}}
BY_ENTRIES = {"by_length": {"column": "marks", "pool_batches": 4, "batch_entries": 24}}


@pytest.mark.parametrize(
    "shuffle",
    [
        {"mode": "none"},
        {"mode": "global"},
        {"mode": "windowed", "window_rows": 64},
        BY_TOKENS,
        BY_ENTRIES,
        {"mode": "windowed", "window_rows": 64, **BY_ENTRIES},
        {"sample": {"weights": "id"}, **BY_TOKENS},
    ],
    ids=str,
)
def test_lists_are_right_on_any_rank_and_from_any_step(opened: Callable[..., CachedFeed], shuffle: dict[str, Any]) -> None:
    whole = list(opened(**shuffle).batches(1))
    for batch in whole:
        check(batch)
    ids = np.concatenate([batch.row_ids for batch in whole])
    if "sample" not in shuffle:
        assert sorted(ids.tolist()) == list(range(ROWS))
    assert whole[-1].position == ROWS
    for world_size in (2, 3):
        ranks = [list(opened(rank, world_size, **shuffle).batches(1)) for rank in range(world_size)]
        for alone, *parts in zip(whole, *ranks, strict=True):
            assert np.concatenate([part.row_ids for part in parts]).tolist() == alone.row_ids.tolist()
            for part in parts:
                check(part)
    for number, batch in enumerate(whole):
        rest = list(opened(**shuffle).batches(1, batch.position))
        assert [b.row_ids.tolist() for b in rest] == [b.row_ids.tolist() for b in whole[number + 1 :]]


def test_steps_have_like_lengths_in_random_order(opened: Callable[..., CachedFeed]) -> None:
    def padding(**shuffle: Any) -> int:
        return sum(int((b.columns["tokens"] == -1).sum()) for b in opened(**shuffle).batches(0))

    assert padding(**BY_TOKENS) < 0.35 * padding()
    mean_lengths = [b.columns["tokens_length"].float().mean().item() for b in opened(**BY_TOKENS).batches(0)]
    assert mean_lengths != sorted(mean_lengths)
    # Inside a step the rows are as they were drawn: no rank gets the short ones.
    first = next(opened(**BY_TOKENS).batches(0)).columns["tokens_length"].tolist()
    assert first != sorted(first)
    orders = [[b.row_ids.tolist() for b in opened(**BY_TOKENS).batches(epoch)] for epoch in (0, 1)]
    assert orders[0] != orders[1]


def test_step_has_at_most_batch_entries(opened: Callable[..., CachedFeed]) -> None:
    padded = {"by_length": {"column": "tokens", "batch_entries": 40}}
    for batch in opened(**padded).batches(0):
        assert batch.columns["tokens"].numel() <= 40
        assert batch.rows <= BATCH  # also where rows are empty
    entries = [len(batch.columns["marks"]) for batch in opened(**BY_ENTRIES).batches(0)]
    assert max(entries) <= 24
    assert np.median(entries) > 20, "a step is filled as far as it goes"
    alone = [
        b for b in opened(by_length={"column": "tokens", "batch_entries": 4}).batches(0) if b.columns["tokens"].numel() > 4
    ]
    assert alone
    assert {batch.rows for batch in alone} == {1}, "a row that is larger than a step is a step of its own"


def test_order_by_length_has_its_own_fingerprint() -> None:
    prints = {
        make_order(ShuffleSpec.model_validate({"seed": 3, **shuffle}), ROWS).fingerprint
        for shuffle in ({}, BY_TOKENS, BY_ENTRIES, {"by_length": {"column": "tokens", "pool_batches": 5}})
    }
    assert len(prints) == 4


def test_rows_are_not_sampled_by_a_column_of_lists(opened: Callable[..., CachedFeed]) -> None:
    with pytest.raises(SpecError, match=r"column 'tokens' is int32\[\*\]: several values per row"):
        opened(sample={"weights": "tokens"})


def test_order_by_length_needs_lists(opened: Callable[..., CachedFeed]) -> None:
    for wrong in ({"by_length": {"column": "age"}}, {"by_length": {"column": "tokens"}, "columns": ["age"]}):
        with pytest.raises(SpecError, match="is not a column of lists"):
            opened(**wrong)


def test_the_caller_may_keep_and_change_a_batch(opened: Callable[..., CachedFeed]) -> None:
    batches = list(opened().batches(0))
    for column in batches[0].columns.values():
        column.zero_()
    for batch in batches[1:]:
        check(batch)
    for batch in opened().batches(0):
        check(batch)
    single = next(opened(rank=0, world_size=BATCH).batches(0))  # one row: a view would be of the shard itself
    single.columns["marks"].fill_(9)
    single.columns["tokens"].fill_(9)
    check(next(opened().batches(0)))


def test_some_rows_of_a_batch_are_a_batch(opened: Callable[..., CachedFeed]) -> None:
    batch = next(opened().batches(0))
    for low, high in ((0, 10), (10, 32), (5, 5)):
        part = batch_rows_of(batch.columns, low, high, ["marks"])
        lists = part["marks_offsets"]
        assert lists.tolist() == [0, *np.cumsum(batch.row_ids[low:high] % 3).tolist()]
        assert len(part["marks"]) == lists[-1]
        assert part["id"].tolist() == batch.row_ids[low:high].tolist()


def test_columns_named_like_lists_are_plain_rows() -> None:
    plain = {"clicks": torch.arange(6), "clicks_offsets": torch.arange(6) * 2}
    part = batch_rows_of(plain, 2, 4, packed=())
    assert {name: column.tolist() for name, column in part.items()} == {"clicks": [2, 3], "clicks_offsets": [4, 6]}


def test_augmentation_of_packed_lists_must_keep_offsets(opened: Callable[..., CachedFeed]) -> None:
    def batches(change: Callable[[dict[str, Any]], dict[str, Any]]) -> list[Batch]:
        feed = opened()
        feed.augment_with(lambda columns, generator: {**columns, **change(columns)}, seed=1)
        return list(feed.batches(0))

    doubled = batches(lambda columns: {"marks": columns["marks"] * 2})
    for batch, plain in zip(doubled, opened().batches(0), strict=True):
        assert torch.equal(batch.columns["marks"], plain.columns["marks"] * 2)
    for broken in (
        lambda columns: {"marks": columns["marks"][1:]},
        lambda columns: {"marks_offsets": columns["marks_offsets"][1:]},
    ):
        with pytest.raises(SpecError, match="augment returned a wrong batch of 32 rows"):
            batches(broken)


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"])
def test_every_type_of_entry_is_padded(tmp_path: Path, dtype: str) -> None:
    lists = pa.table({"x": pa.array([[1, 2], [], [3]], pa.list_(pa.int64()))})
    source = Source.of(tmp_path, {"train/a.parquet": lists}, [{"ragged": {"columns": ["x"], "dtype": dtype, "pad_value": 7}}])
    order = make_order(ShuffleSpec(mode="none"), 3)
    batch = next(open_cached_feed([(source.storage, source.materialize())], "train", batch_rows=3, order=order).batches(0))
    assert batch.columns["x"].dtype == getattr(torch, dtype)
    assert batch.columns["x"].tolist() == [[1, 2], [7, 7], [3, 7]]


def test_encoded_images_keep_their_size_on_disk(prepared: tuple[Source, DatasetManifest]) -> None:
    source, manifest = prepared
    shard = open_shard(source.storage.local_path(manifest.shards[0].path))
    pictures = shard.column("picture")
    first = pictures.values[pictures.offsets[0] : pictures.offsets[1]].tobytes()  # type: ignore[union-attr]
    assert first == png(0)
    assert {str(column) for column in manifest.feed_schema.columns} == {
        "id: int64", "tokens: int32[*]", "marks: float32[*]", "picture: uint8[6, 5, 3]", "age: float64",
    }  # fmt: skip


def test_shards_of_lists_end_by_bytes_for_any_tables(tmp_path: Path) -> None:
    digests = []
    for files in (1, 3):
        source = Source.of(tmp_path / str(files), steps=[{"drop": ["picture", "age"]}, *STEPS[:2]])
        (source.folder / "train").mkdir(parents=True)
        for number, ids in enumerate(np.split(np.arange(ROWS), files)):
            pq.write_table(source_rows(ids), source.folder / "train" / f"{number}.parquet", row_group_size=70 // files)
        manifest = source.materialize(spec=MaterializeSpec(unit_bytes=1 << 30, shard_bytes=3000))
        shards = [open_shard(source.storage.local_path(shard.path)) for shard in manifest.shards]
        assert len(shards) > 3
        values = [int(shard.column("tokens").offsets[-1]) for shard in shards]  # type: ignore[union-attr]
        sizes = [tokens * 4 + shard.rows * 36 for tokens, shard in zip(values, shards, strict=True)]
        assert all(2000 < size < 4500 for size in sizes[:-1]), sizes
        digests.append([shard.rows for shard in manifest.shards])
    assert digests[0] == digests[1]


def test_forked_process_is_refused(opened: Callable[..., CachedFeed], tmp_path: Path) -> None:
    feed = opened()
    next(feed.batches(0))

    def read_in_the_child() -> None:
        try:
            next(feed.batches(1))
        except SpecError as error:
            (tmp_path / "said").write_text(str(error))

    child = multiprocessing.get_context("fork").Process(target=read_in_the_child)
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
        child.join()
    assert "is read after a fork" in (tmp_path / "said").read_text()


def test_bad_lists_and_images_are_named_by_their_row() -> None:
    def prepare(values: list[Any], kind: pa.DataType, step: dict[str, Any], **data: Any) -> pa.Table:
        return transform_table(pa.table({"x": pa.array(values, kind), "y": list(range(len(values)))}), [step], **data)

    lists, step = pa.list_(pa.float64()), {"ragged": {"columns": ["x"]}}
    with pytest.raises(DataError, match=r"1 row has a null in x; first: part-0\.parquet, row 101"):
        prepare([[1.0], None], lists, step)
    with pytest.raises(DataError, match="1 row has a null in x"):
        prepare([[1.0], [2.0, None]], lists, step)
    with pytest.raises(DataError, match=r"2 rows have NaN or an infinity in x; first: part-0\.parquet, row 100"):
        prepare([[float("nan")], [], [1.0, float("inf")]], lists, step)
    kept = prepare([[1.0], None, [2.0, None], [3.0, 4.0, 5.0], [float("nan")]], lists, step, invalid="drop")
    assert kept["y"].to_pylist() == [0, 3]
    assert kept["x"].to_pylist() == [[1.0], [3.0, 4.0, 5.0]]
    cut = prepare([[1.0], [3.0, 4.0, 5.0], []], lists, {"ragged": {"columns": ["x"], "max_length": 2}})
    assert cut["x"].to_pylist() == [[1.0], [3.0, 4.0], []]
    with pytest.raises(DataError, match="ragged cannot take column 'x' of type list<item: string>"):
        prepare([["a"]], pa.list_(pa.string()), step)
    with pytest.raises(DataError, match="ragged cannot take column 'y' of type int64"):
        prepare([[1.0]], lists, {"ragged": {"columns": ["y"]}})
    with pytest.raises(DataError, match=r"there is no column 'z' at this point"):
        prepare([[1.0]], lists, {"ragged": {"columns": ["z"]}})
    with pytest.raises(DataError, match=r"lists of unequal length") as caught:
        prepare([[1.0], [2.0, 3.0]], lists, {"drop": ["y"]})
    assert "ragged: {columns: [x]}" in caught.value.next_step
    packed = {"ragged": {"columns": ["x"], "batch": "packed"}}
    with pytest.raises(DataError, match="the label 'x' holds images, or lists that a batch joins; lists as a label are padded"):
        prepare([[1.0]], lists, packed, label="x")
    boxes = pa.list_(pa.list_(pa.float32(), 2))
    joined = prepare([[[1, 2], [3, 4]], [], [[5, 6]]], boxes, step, label="x")
    assert joined["x"].to_pylist() == [[1, 2, 3, 4], [], [5, 6]]
    with pytest.raises(DataError, match="1 row has a null in x"):
        prepare([[[1, 2]], None], boxes, step)
    for options, words in (
        ({"pad_value": 0.5}, "pad_value 0.5 is not a value for column 'x' of int64"),
        ({"dtype": "uint8", "pad_value": -1}, "pad_value -1 is not a value for column 'x' of uint8"),
        ({"dtype": "int8"}, "an entry of column 'x' does not fit dtype int8"),
    ):
        with pytest.raises(DataError, match=words):
            prepare([[1], [300, 2]], pa.list_(pa.int64()), {"ragged": {"columns": ["x"], **options}})
    with pytest.raises(ValidationError, match="pad_value"):
        prepare([[1.0]], lists, {"ragged": {"columns": ["x"], "pad_value": float("nan")}})
    encoded = {"decode_image": {"column": "x", "keep": "encoded"}}
    with pytest.raises(DataError, match=r"1 row has an image in x that cannot be decoded; first: part-0\.parquet, row 101"):
        prepare([png(1), png(2)[:-30]], pa.binary(), encoded)


def test_batch_without_rows_left_is_described() -> None:
    empty = pa.table({"x": pa.array([None], pa.float64()), "y": [1.0]})
    step = {"concatenator": {"columns": ["x", "y"]}}
    with pytest.raises(DataError, match="1 row has a null in x"):
        transform_table(empty, [step])
    assert transform_table(empty, [step], invalid="drop").num_rows == 0


def test_column_named_like_a_length_is_refused() -> None:
    table = pa.table({"x": [[1], [2, 3]], "x_length": [1, 2]})
    with pytest.raises(DataError, match="the column name 'x_length' is taken"):
        transform_table(table, [{"ragged": {"columns": ["x"]}}])


FUNCTION = """
import numpy as np

def split(batch):
    rows = [np.array([ord(w) for w in text.split()], np.int16) if text != "?" else None for text in batch["text"]]
    rows = [np.array([]) if row is not None and not len(row) else row for row in rows]
    out = np.empty(len(rows), object)
    out[:] = rows
    return {"x": out}

def loose(batch):
    return {"x": np.array([np.array([1, 2]) for _ in batch["text"]], dtype=object)}
"""


@pytest.mark.parametrize(
    ("texts", "expected", "length"),
    [
        (["a b", "", "c d e"], [[97, 98, 0], [0, 0, 0], [99, 100, 101]], [2, 0, 3]),
        (["a b", "c d"], [[97, 98], [99, 100]], [2, 2]),
        (["a b"], [[97, 98]], [2]),
        (["a b", "?", "c"], [[97, 98], [99, 0]], [2, 1]),
    ],
)
def test_a_function_makes_the_lists(tmp_path: Path, texts: list[str], expected: list[list[int]], length: list[int]) -> None:
    steps = [{"map_batches": "words.py:split"}, {"ragged": {"columns": ["x"]}}]
    source = Source.of(tmp_path, {"train/a.parquet": pa.table({"text": texts})}, steps, invalid="drop")
    (tmp_path / "words.py").write_text(FUNCTION)
    manifest = source.materialize()
    assert [str(column) for column in manifest.feed_schema.columns] == ["x: int16[*]"]
    order = make_order(ShuffleSpec(mode="none"), len(length))
    batch = next(open_cached_feed([(source.storage, manifest)], "train", batch_rows=4, order=order).batches(0))
    assert batch.columns["x"].tolist() == expected
    assert batch.columns["x_length"].tolist() == length


def test_lists_stacked_by_numpy_stay_lists(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(FUNCTION)
    for step, shape in (
        ({"ragged": {"columns": ["x"]}}, "x: int64[*]"),
        ({"concatenator": {"columns": ["x"]}}, "features: float32[2]"),
    ):
        source = Source.of(
            tmp_path, {"train/a.parquet": pa.table({"text": ["a", "b"]})}, [{"map_batches": "words.py:loose"}, step]
        )
        assert [str(column) for column in source.materialize().feed_schema.columns] == [shape]
