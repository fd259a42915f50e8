"""Who is measured, each with its documented best settings for one process on one machine?

Libraries are imported inside the functions, so that one that is not installed leaves out its own line only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import penstock.ingest.feed.read_ahead
from benchmarks.loaders.cached_dataset import manifest
from benchmarks.loaders.consumers import BATCH, Batches, Contender
from benchmarks.loaders.feed_data import Rows, arrays
from penstock.ingest.feed.cached import open_cached_feed
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage

__all__ = ["CONTENDERS", "MemoryMap", "numpy_gather", "penstock_feed"]


def _own_ids(rows: Rows, rank: int, world: int, epoch: int) -> np.ndarray:
    """This consumer's rows of a global permutation, drawn before the first batch."""
    ids = np.random.default_rng([epoch, 5]).permutation(rows.rows)
    return np.ascontiguousarray(ids[rank::world])


def copy_in_order(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """Neighbouring rows of a memory-mapped array copied into a fresh tensor, not shuffled: the memory's own rate."""
    x, label = arrays(rows, folder)
    first, last = rank * len(x) // world, (rank + 1) * len(x) // world
    for start in range(first, last, BATCH):
        own = slice(start, min(start + BATCH, last))
        yield torch.from_numpy(x[own].copy()), torch.from_numpy(label[own].copy())


def numpy_gather(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """numpy gathers random rows of a memory-mapped array into a fresh tensor: the shortest program that shuffles."""
    x, label = arrays(rows, folder)
    ids = _own_ids(rows, rank, world, epoch)
    for start in range(0, len(ids), BATCH):
        own = ids[start : start + BATCH]
        yield torch.from_numpy(x[own]), torch.from_numpy(label[own])


def take_reused(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """The same into a buffer that is used again for every batch; the consumer may not keep a batch."""
    x, label = arrays(rows, folder)
    ids = _own_ids(rows, rank, world, epoch)
    own_x, own_label = torch.empty((BATCH, *rows.shape), dtype=torch.from_numpy(x[:1].copy()).dtype), torch.empty(BATCH).long()
    for start in range(0, len(ids), BATCH):
        own = ids[start : start + BATCH]
        x.take(own, 0, own_x.numpy()[: len(own)], "clip")
        label.take(own, 0, own_label.numpy()[: len(own)], "clip")
        yield own_x[: len(own)], own_label[: len(own)]


def penstock_feed(
    rows: Rows,
    folder: Path,
    rank: int,
    world: int,
    epoch: int,
    *,
    mode: str,
    prefetch: int,
    window_rows: int = 1 << 18,
    lanes: int | str = "auto",
    from_the_start: bool = False,
) -> Batches:
    """penstock's feed in one of its orders.

    Args:
        from_the_start: read ahead also for a consumer that does nothing meanwhile, as those that are measured here.
    """
    if from_the_start:
        penstock.ingest.feed.read_ahead.LOST_S = 0.0
    feed = _feed(rows, str(folder), rank, world, mode, prefetch, window_rows, lanes)
    for batch in feed.batches(epoch):
        yield batch.columns["x"], batch.columns["label"]


@functools.lru_cache(maxsize=4)
def _feed(rows: Rows, folder: str, rank: int, world: int, mode: str, prefetch: int, window_rows: int, lanes: int | str) -> Any:
    made = manifest(rows, Path(folder))
    spec = ShuffleSpec.model_validate({"mode": mode, "seed": 17, "window_rows": window_rows, "lanes": lanes})
    order = make_order(spec, rows.rows, [shard.rows for shard in made.shards], BATCH * world)
    return open_cached_feed(
        [(Storage(folder), made)],
        "train",
        batch_rows=BATCH * world,
        order=order,
        rank=rank,
        world_size=world,
        prefetch=prefetch,
    )


class MemoryMap(torch.utils.data.Dataset):
    """What one writes by hand: a map-style dataset that fetches a batch with one gather."""

    def __init__(self, rows: Rows, folder: Path) -> None:
        self.x, self.label = arrays(rows, folder)

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.x[index], int(self.label[index])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        own = np.asarray(indices)
        return torch.from_numpy(self.x[own]), torch.from_numpy(self.label[own])


def _loader(kind: type, rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    data = MemoryMap(rows, folder)
    sampler = torch.utils.data.distributed.DistributedSampler(data, world, rank, shuffle=True, seed=17)
    sampler.set_epoch(epoch)
    yield from kind(data, batch_size=BATCH, sampler=sampler, num_workers=0, collate_fn=lambda batch: batch)


def torch_loader(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """torch's DataLoader over a memory map, batched fetches, no worker processes (they cost more than they bring here)."""
    return _loader(torch.utils.data.DataLoader, rows, folder, rank, world, epoch)


def stateful_loader(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """torchdata's StatefulDataLoader, the same way."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return _loader(StatefulDataLoader, rows, folder, rank, world, epoch)


def hf_datasets(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """Hugging Face datasets: Arrow on disk, flat column, shuffled indices, torch format."""
    import datasets

    datasets.disable_progress_bars()
    target = folder / "data"
    if not target.exists():

        def examples() -> Iterator[dict[str, Any]]:
            for x, label in rows.chunks():
                for values, number in zip(x.reshape(len(x), -1), label, strict=True):
                    yield {"x": values, "label": int(number)}

        features = datasets.Features(
            {"x": datasets.List(datasets.Value(rows.dtype), length=int(np.prod(rows.shape))), "label": datasets.Value("int64")}
        )
        made = datasets.Dataset.from_generator(examples, features=features, cache_dir=str(folder / "cache"))
        made.save_to_disk(str(target))
    data = datasets.load_from_disk(str(target)).with_format("torch")
    ids = _own_ids(rows, rank, world, epoch)
    for start in range(0, len(ids), BATCH):
        found = data[ids[start : start + BATCH]]
        yield found["x"].reshape(-1, *rows.shape), found["label"]


def lance_take(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """Lance: random access by row id."""
    import lance
    import pyarrow as pa

    target = folder / "data.lance"
    width = int(np.prod(rows.shape))
    schema = pa.schema([("x", pa.list_(pa.from_numpy_dtype(np.dtype(rows.dtype)), width)), ("label", pa.int64())])
    if not target.exists():

        def batches() -> Iterator[pa.RecordBatch]:
            for x, label in rows.chunks():
                flat = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), width)
                yield pa.record_batch([flat, pa.array(label)], schema=schema)

        lance.write_dataset(batches(), str(target), schema=schema)
    data = lance.dataset(str(target))
    ids = _own_ids(rows, rank, world, epoch)
    for start in range(0, len(ids), BATCH):
        table = data.take(ids[start : start + BATCH]).combine_chunks()
        x = table["x"].chunk(0).flatten().to_numpy(zero_copy_only=False).reshape(-1, *rows.shape)
        yield torch.from_numpy(x.copy()), torch.from_numpy(table["label"].to_numpy().copy())


def webdataset_tar(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """WebDataset: tar files of raw bytes, shards shuffled and a shuffle buffer of 10,000."""
    import webdataset as wds

    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        with wds.ShardWriter(str(folder / "part-%04d.tar"), maxcount=CHUNK_ROWS, verbose=0, mtime=0) as sink:
            for x, label in rows.chunks():
                for values, number in zip(x, label.tolist(), strict=True):
                    sink.write({"__key__": f"{number:09d}", "x": values.tobytes(), "label": number.to_bytes(8, "little")})
        (folder / "done").touch()
    parts = sorted(map(str, folder.glob("*.tar")))[rank::world]
    data = wds.WebDataset(parts, shardshuffle=len(parts), empty_check=False, seed=epoch).shuffle(10_000)
    held: list[dict[str, bytes]] = []
    for sample in data:
        held.append(sample)
        if len(held) == BATCH:
            yield _joined(held, rows)
            held = []
    if held:
        yield _joined(held, rows)


CHUNK_ROWS = 10_000


def _joined(samples: list[dict[str, bytes]], rows: Rows) -> tuple[Tensor, Tensor]:
    x = np.frombuffer(b"".join(sample["x"] for sample in samples), rows.dtype).reshape(-1, *rows.shape)
    label = np.frombuffer(b"".join(sample["label"] for sample in samples), np.int64)
    return torch.from_numpy(x.copy()), torch.from_numpy(label.copy())


def grain_memory(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """Grain: a random-access source over the memory map, global shuffle, no read threads (they cost more here)."""
    import grain

    x, label = arrays(rows, folder)

    class Source:
        def __len__(self) -> int:
            return len(label)

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
            return x[index], label[index]

    data = grain.MapDataset.source(Source()).shuffle(seed=epoch)[rank::world].batch(BATCH)
    for values, numbers in data.to_iter_dataset(grain.ReadOptions(num_threads=0)):
        yield torch.from_numpy(np.asarray(values)), torch.from_numpy(np.asarray(numbers))


def litdata_stream(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """LitData: its optimized chunks, shuffled, no loader workers. One consumer of the whole, or a half of the chunks each."""
    import litdata

    half = folder / f"{world}-{rank}"
    if not (half / "index.json").exists():
        lows = range(rank * rows.rows // world, (rank + 1) * rows.rows // world, CHUNK_ROWS)
        high = (rank + 1) * rows.rows // world
        litdata.optimize(
            fn=functools.partial(_litdata_rows, rows, str(folder.parent / "arrays"), high),
            inputs=list(lows),
            output_dir=str(half),
            num_workers=1,
            chunk_bytes="64MB",
        )
    # Its default decodes 32 neighbours for each item, which a shuffled reader throws away.
    data = litdata.StreamingDataset(str(half), shuffle=True, seed=17, drop_last=False, batch_decode=0)
    data.current_epoch = epoch + 1
    yield from litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=0)


def _litdata_rows(rows: Rows, folder: str, high: int, low: int) -> Iterator[tuple[Tensor, int]]:
    x, label = arrays(rows, Path(folder))
    for index in range(low, min(low + CHUNK_ROWS, high)):
        yield torch.from_numpy(x[index].copy()), int(label[index])


CONTENDERS: dict[str, Contender] = {
    "numpy gather, fresh tensor": Contender(numpy_gather, "arrays"),
    "numpy copy in order (no shuffle)": Contender(copy_in_order, "arrays"),
    "numpy take into a reused buffer": Contender(take_reused, "arrays"),
    "penstock, global": Contender(functools.partial(penstock_feed, mode="global", prefetch=2), "penstock"),
    "penstock, global, no thread": Contender(functools.partial(penstock_feed, mode="global", prefetch=0), "penstock"),
    "penstock, global, always a thread": Contender(
        functools.partial(penstock_feed, mode="global", prefetch=2, from_the_start=True), "penstock"
    ),
    "penstock, global, one lane": Contender(functools.partial(penstock_feed, mode="global", prefetch=2, lanes=1), "penstock"),
    "penstock, global, 64 lanes": Contender(functools.partial(penstock_feed, mode="global", prefetch=2, lanes=64), "penstock"),
    "penstock, windowed, one lane": Contender(
        functools.partial(penstock_feed, mode="windowed", prefetch=2, lanes=1), "penstock"
    ),
    "penstock, windowed": Contender(functools.partial(penstock_feed, mode="windowed", prefetch=2), "penstock"),
    "penstock, as stored": Contender(functools.partial(penstock_feed, mode="none", prefetch=2), "penstock"),
    "torch DataLoader, batched": Contender(torch_loader, "arrays"),
    "torchdata StatefulDataLoader, batched": Contender(stateful_loader, "arrays"),
    "HF datasets": Contender(hf_datasets, "hf"),
    "Lance take": Contender(lance_take, "lance"),
    "Grain": Contender(grain_memory, "arrays"),
    "LitData": Contender(litdata_stream, "litdata"),
    "WebDataset": Contender(webdataset_tar, "webdataset"),
}
"""The first one is what all others are divided by, inside each round."""
