"""What does preparing JPEG files cost beside a program written by hand?

    python -m benchmarks.prepare_images [--rounds 5] [--out benchmarks/results]

8,000 JPEG files of 500 x 375 in ten folders become uint8[224, 224, 3] and the folder as a class, in Arrow files, in two
processes that run already. By hand: Pillow decodes and resizes; or, where it is installed, simplejpeg (libjpeg-turbo without
Pillow) decodes and torch resizes. penstock also looks at the whole source, hashes what it reads and writes, and commits each
unit.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, rows_per_s, save
from benchmarks.prepare import prepare_with_penstock
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.ray_tasks import ray_map

CLASSES, EACH, SIZE, TO = 10, 800, (375, 500), 224
BATCH = 100
PILLOW, SIMPLEJPEG, OURS = "by hand, Pillow in two processes", "by hand, simplejpeg and torch", "penstock"
VERSIONS = ("numpy", "pyarrow", "Pillow", "torch", "ray")


def main() -> None:
    """Measure, and write `prepare_images.json`."""
    options = options_parser(5).parse_args()
    source = _written(options.data / f"jpeg-{CLASSES * EACH}")
    programs: dict[str, partial[None]] = {PILLOW: partial(_by_hand, _pillow, source)}
    versions = VERSIONS
    if find_spec("simplejpeg"):
        programs[SIMPLEJPEG] = partial(_by_hand, _simplejpeg, source)
        versions = (*VERSIONS, "simplejpeg")
    programs[OURS] = partial(_with_penstock, source)
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:

        def measure(name: str) -> float:
            out = options.data / "jpeg-out"
            shutil.rmtree(out, ignore_errors=True)
            began = time.perf_counter()
            if name == OURS:
                programs[name](out)
            else:
                programs[name](out, pool)
            seconds = time.perf_counter() - began
            shutil.rmtree(out)
            return CLASSES * EACH / seconds

        for name in programs:
            measure(name)  # all are warm
        found = rows_per_s("images", programs, options.rounds, measure)
    ray.shutdown()
    size = sum(file.stat().st_size for file in source.rglob("*.jpg"))
    result = {"machine": describe(versions), "rounds": options.rounds, "rows": CLASSES * EACH, "mb": round(size / 1e6)}
    save(options.out, "prepare_images", result | {"variants": beside_the_first(found, "rows_per_s")})


def _written(folder: Path) -> Path:
    """The source, written on the first call: smooth pictures with some noise, about as large as photographs are."""
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        rng = np.random.default_rng(7)
        for number in range(CLASSES * EACH):
            coarse = rng.integers(0, 256, (24, 32, 3), np.uint8)
            smooth = np.asarray(Image.fromarray(coarse).resize(SIZE[::-1], Image.Resampling.BICUBIC), np.int16)
            noisy = np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
            home = part / f"class-{number % CLASSES}"
            home.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noisy).save(home / f"{number:05}.jpg", quality=85)
        part.rename(folder)
    return folder


def _by_hand(decode: Callable[[Path], np.ndarray], source: Path, out: Path, pool: ProcessPoolExecutor) -> None:
    out.mkdir(parents=True)
    files = sorted(source.rglob("*.jpg"))
    names = sorted({file.parent.name for file in files})
    parts = [files[start : start + BATCH] for start in range(0, len(files), BATCH)]
    list(pool.map(partial(_write, decode, out, names), range(len(parts)), parts))


def _write(decode: Callable[[Path], np.ndarray], out: Path, names: list[str], number: int, files: list[Path]) -> None:
    pixels = np.stack([decode(file) for file in files])
    labels = pa.array([names.index(file.parent.name) for file in files])
    batch = pa.record_batch({"image": tensor_array(pixels), "label": labels})
    with pa.OSFile(str(out / f"{number}.arrow"), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _pillow(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB").resize((TO, TO), Image.Resampling.BILINEAR))


def _simplejpeg(file: Path) -> np.ndarray:
    import simplejpeg
    import torch

    torch.set_num_threads(1)
    pixels = torch.from_numpy(simplejpeg.decode_jpeg(file.read_bytes())).permute(2, 0, 1).unsqueeze(0)
    resized = torch.nn.functional.interpolate(pixels, size=(TO, TO), mode="bilinear", antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _with_penstock(source: Path, out: Path) -> None:
    data = {"format": "images", "train": str(source), "label": "label", "images": {"size": [TO, TO]}}
    steps: list[dict[str, Any]] = [
        {"decode_image": {"column": "image"}},
        {"label_encoder": {"column": "label"}},
        {"drop": ["path"]},
    ]
    prepare_with_penstock(data, steps, out, ray_map)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
