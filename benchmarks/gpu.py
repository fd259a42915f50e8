"""How busy is a GPU that learns from the feed, beside one that learns from rows it holds already?

    python -m benchmarks.gpu [--rounds 5] [--steps 500] [--device cuda] [--out benchmarks/results]

A convolutional network learns from shuffled batches of 1,024 images of bytes that become floats on the GPU. The first variant
goes round and round a few batches that lie there: what the GPU does when it never waits, so the ratio to it is the share of the
time that the GPU is busy. Without a GPU there is nothing to measure, and nothing is written.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.loaders.cached_dataset import manifest
from benchmarks.loaders.contenders import MemoryMap
from benchmarks.loaders.feed_data import TABLES, arrays
from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, rows_per_s, save
from penstock.ingest.feed.cached import CachedFeed, open_cached_feed
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.storage import Storage

ROWS, BATCH, WARM_STEPS, HELD = TABLES["images"], 1024, 50, 8
VERSIONS = ("numpy", "torch")
Batches = Iterator[tuple[Tensor, Tensor]]
"""Images as floats, and labels; on the device."""


def main() -> None:
    """Measure, and write `gpu.json`."""
    options = gpu_options("gpu")
    if options is None:
        return
    home, device = options.data / ROWS.name, torch.device(options.device)
    arrays(ROWS, home / "arrays")
    manifest(ROWS, home / "penstock")
    variants: dict[str, Callable[[Path, torch.device], Batches]] = {
        "rows on the GPU already": _held,
        "penstock, device='cuda'": _delivered,
        "penstock, copied in the loop": _copied,
        "torch DataLoader, batched, two workers, pin_memory": _loader,
    }
    found = rows_per_s(
        "gpu", variants, options.rounds, lambda name: _measure(variants[name](home, device), device, options.steps)
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    result = {"machine": describe(VERSIONS), "gpu": name, "rounds": options.rounds, "steps": options.steps, "batch_rows": BATCH}
    save(options.out, "gpu", {**result, "variants": beside_the_first(found, "rows_per_s")})


def gpu_options(name: str) -> argparse.Namespace | None:
    """The options of a benchmark of a GPU; None, and a word on it, where there is none."""
    parser = options_parser(5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda", help="another one shows that this runs, and measures nothing of use")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"{name}: left out, there is no GPU here")
        return None
    return options


def _measure(batches: Batches, device: torch.device, steps: int) -> float:
    """Rows per second of `steps` steps, after some that warm up."""
    torch.manual_seed(17)
    model = _network().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    began = 0.0
    for step, (image, label) in enumerate(itertools.islice(batches, WARM_STEPS + steps)):
        if step == WARM_STEPS:
            began = _now(device)
        loss = nn.functional.cross_entropy(model(image.permute(0, 3, 1, 2)), label % 10)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps * BATCH / (_now(device) - began)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _network() -> nn.Module:
    layers = [layer for width in (32, 64) for layer in (nn.LazyConv2d(width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))]
    network = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10))
    network(torch.zeros(1, 3, *ROWS.shape[:2]))
    return network


def _epochs(epoch: Callable[[int], Batches]) -> Batches:
    for number in itertools.count():
        for image, label in epoch(number):
            if len(label) == BATCH:  # cuDNN chooses anew for another shape
                yield image, label


def _held(home: Path, device: torch.device) -> Batches:
    return itertools.cycle(list(itertools.islice(_delivered(home, device), HELD)))


def _delivered(home: Path, device: torch.device) -> Batches:
    feed = _feed(home)
    feed.deliver_to(device, {"x": (1 / 255, -0.5)})
    return _epochs(lambda epoch: ((batch.columns["x"], batch.columns["label"]) for batch in feed.batches(epoch)))


def _copied(home: Path, device: torch.device) -> Batches:
    feed = _feed(home)
    return _epochs(lambda epoch: (_on(device, batch.columns["x"], batch.columns["label"]) for batch in feed.batches(epoch)))


def _loader(home: Path, device: torch.device) -> Batches:
    loader = torch.utils.data.DataLoader(
        MemoryMap(ROWS, home / "arrays"),
        batch_size=BATCH,
        shuffle=True,
        collate_fn=_as_it_is,
        num_workers=2,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    return _epochs(lambda _epoch: (_on(device, *batch) for batch in loader))


def _as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def _on(device: torch.device, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    image = image.to(device, non_blocking=True).to(torch.float32).mul(1 / 255).sub_(0.5)
    return image, label.to(device, non_blocking=True)


def _feed(home: Path) -> CachedFeed:
    order = make_order(ShuffleSpec(seed=17), ROWS.rows)
    made = manifest(ROWS, home / "penstock")
    return open_cached_feed([(Storage(str(home / "penstock")), made)], "train", batch_rows=BATCH, order=order)


if __name__ == "__main__":
    main()
