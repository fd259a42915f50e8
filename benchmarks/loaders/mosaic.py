"""MosaicML Streaming, measured by an interpreter of its own, because what it needs does not fit beside the other contenders.

    .venv-bench-mosaic/bin/python -m benchmarks.loaders.mosaic NAME TABLE HOME WORLD SECONDS [--check]

`make bench` makes that environment from benchmarks/requirements-mosaic.txt, and benchmarks.feed runs this command, which
prints rows per second. Settings: uncompressed shards on the local disk, fixed-size arrays, no cache limit, rows of a batch
stacked by one call (torch's own way of joining rows was no faster).
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.loaders.consumers import BATCH, Batches, Contender, measure
from benchmarks.loaders.feed_data import TABLES, Rows

__all__ = ["MOSAIC_CONTENDERS", "measure_mosaic", "mosaic_version"]


ENVIRONMENT = Path(".venv-bench-mosaic")

PACKAGE = "mosaicml-streaming"

WORKERS = 4
"""Of all consumers together. Two threads of a StreamingDataset go through the rows before the one that reads them, under one
lock of the interpreter; on two cores four processes gave two to three times what none gave, and eight no more."""


def streaming_dataset(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """StreamingDataset: its default shuffle (py1e) and read-ahead. One consumer of the whole, or a half of the rows each.

    Two consumers are not two ranks of one StreamingDataset: ranks wait for each other at each epoch's begin, so that the one
    whose time is over would leave the other one waiting for ever.
    """
    data, loader = _streaming_loader(rows, folder, rank, world)
    data.next_epoch = epoch
    yield from loader


@functools.lru_cache(maxsize=1)
def _streaming_loader(rows: Rows, folder: Path, rank: int, world: int) -> tuple[Any, Any]:
    half = _written(rows, folder, rank, world)
    data = _streaming().StreamingDataset(local=str(half), shuffle=True, shuffle_seed=17, batch_size=BATCH)
    loader = _streaming().StreamingDataLoader(
        data,
        batch_size=BATCH,
        num_workers=WORKERS // world,
        persistent_workers=True,
        collate_fn=_joined,
        multiprocessing_context="fork",  # torch's default on Linux, but not in a consumer, which was spawned itself
    )
    return data, loader


def local_dataset(rows: Rows, folder: Path, rank: int, world: int, epoch: int) -> Batches:
    """LocalDataset, which reads shards that are all there: torch's DataLoader draws the rows, without worker processes."""
    data = _streaming().LocalDataset(str(_written(rows, folder, 0, 1)))
    sampler = torch.utils.data.distributed.DistributedSampler(data, world, rank, shuffle=True, seed=17)
    sampler.set_epoch(epoch)
    yield from torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler, num_workers=0, collate_fn=_joined)


MOSAIC_CONTENDERS = {
    "MosaicML StreamingDataset": Contender(streaming_dataset, "mosaic"),
    "MosaicML LocalDataset": Contender(local_dataset, "mosaic"),
}


def measure_mosaic(name: str, rows: Rows, home: Path, world: int, seconds: float, *, check: bool) -> float:
    """Rows per second of all consumers together, in the other environment.

    Raises:
        FileNotFoundError: that environment is not there.
        RuntimeError: the measurement failed there.
    """
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(f"there is no {ENVIRONMENT} with {PACKAGE}; `make bench` makes it")
    command = [str(python), "-m", "benchmarks.loaders.mosaic", name, rows.name, str(home), str(world), str(seconds)]
    # It leaves lock files in the folder for temporary files, and looks through all of them when it starts.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, *(["--check"] if check else [])], capture_output=True, text=True, env=os.environ | {"TMPDIR": folder}
        )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1])
    return float(done.stdout.split()[-1])


def mosaic_version() -> dict[str, str]:
    """Its name and version where it is installed."""
    folders = [str(path) for path in ENVIRONMENT.glob("lib/python*/site-packages")]
    found = importlib.metadata.distributions(name=PACKAGE, path=folders)
    return {distribution.name: distribution.version for distribution in found}


def _streaming() -> Any:
    # Its ready-made image datasets, unused here, import torchvision; the builds of it that pip finds are for a torch with CUDA
    # and cannot be imported beside one without.
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    import streaming

    return streaming


def _written(rows: Rows, folder: Path, rank: int, world: int) -> Path:
    """The folder with this consumer's part of the rows, written on the first call."""
    part = folder / f"{world}-{rank}"
    if not (part / "index.json").exists():
        low, high = rank * rows.rows // world, (rank + 1) * rows.rows // world
        columns = {"x": f"ndarray:{rows.dtype}:{','.join(map(str, rows.shape))}", "label": "int64"}
        with _streaming().MDSWriter(out=str(part), columns=columns, exist_ok=True) as out:
            for x, label in rows.chunks():
                for values, number in zip(x, label, strict=True):
                    if low <= number < high:
                        out.write({"x": values, "label": number})
    return part


def _joined(samples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    x, label = (np.stack([sample[column] for sample in samples]) for column in ("x", "label"))
    return torch.from_numpy(x), torch.from_numpy(label)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=MOSAIC_CONTENDERS)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("home", type=Path)
    parser.add_argument("world", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    contender, rows = MOSAIC_CONTENDERS[options.name], TABLES[options.table]
    print(measure(contender, rows, options.home, options.world, options.seconds, check=options.check))


if __name__ == "__main__":
    _main()
