"""Functions for Ray Train that report values of many kinds. Captured, never imported."""

import os
import tempfile
from pathlib import Path

import numpy as np
import PIL.Image
import ray.train
import torch


def save(metrics, files):
    """Report a folder with these files: path -> bytes."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            with open(os.path.join(folder, name), "wb") as file:
                file.write(content)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def by_rank(config):
    """Reports on each rank another value and other files; both write `shared`."""
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(2):
        metrics = {"accuracy": 0.5 + rank / 4, "loss": rank + 1.0, **({"only_one": 7.0} if rank == 1 else {})}
        save(metrics, {f"part-{rank}/of/{epoch}.bin": b"%d" % rank, "shared.txt": b"of rank %d" % rank})
    with ray.train.get_checkpoint().as_directory() as folder:
        found = sorted(os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names)
        with open(os.path.join(folder, "shared.txt")) as file:
            return {"rank": rank, "files": found, "shared": file.read(), "mean": np.float32(0.5)}


def shows(config):
    """Reports images, a text, an array and a value that is none of these."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    shown = {"image": PIL.Image.fromarray(pixels), "pixels": pixels, "weights/first": torch.randn(50), "words": "three words"}
    save({"loss": 1.0, "odd": [1, 2], **shown}, {"state.txt": b"1"})
    return torch.nn.Identity()


def too_large(config):
    ray.train.report({"essay": "word " * 300_000})


def own_names(config):
    ray.train.report({"report/date": 1})


def no_better(config):
    """Reports a loss that falls twice, and ends by itself after `most` epochs."""
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder, open(os.path.join(folder, "epoch")) as file:
            first = int(file.read())
    for epoch in range(first, config["most"]):
        save({"loss": [3.0, 2.0, 1.0, 1.5, 1.2, 1.1, 1.4, 1.3][epoch]}, {"epoch": b"%d" % (epoch + 1)})
        if epoch == config.get("dies_after"):
            raise RuntimeError("killed")


def links(config):
    """Reports a folder in which one entry is a link to another folder."""
    with tempfile.TemporaryDirectory() as real, tempfile.TemporaryDirectory() as folder:
        os.symlink(real, os.path.join(folder, "optimizer"))
        ray.train.report({"loss": 1.0}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def big(config):
    """Reports one folder of `megabytes`, in five files."""
    with tempfile.TemporaryDirectory() as folder:
        block = os.urandom(1 << 20)
        for number in range(5):
            with open(os.path.join(folder, f"part-{number}.bin"), "wb") as file:
                for _ in range(config["megabytes"] // 5):
                    file.write(block)
        ray.train.report({"loss": 1.0}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def two_parts(config):
    """Reports two checkpoints of two files."""
    for number in range(2):
        save({"loss": 1.0}, {"a": b"%d" % number, "b": b"%d" % number})


def counted(checkpoint):
    """Return the count in a checkpoint; 0 if there is none."""
    with checkpoint.as_directory() as folder:
        path = Path(folder, "count")
        return int(path.read_text()) if path.exists() else 0


def goes_on(config):
    """Counts on from the count in its checkpoint."""
    first = counted(ray.train.get_checkpoint())
    save({"loss": 1.0}, {"count": b"%d" % (first + 1)})
    return [first, counted(ray.train.get_checkpoint())]
