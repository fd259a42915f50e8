"""Paste scikit-learn's digits on canvases of several sizes, and write pictures with the boxes of their digits as Parquet."""

import io
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits

IMAGES, LABELS = load_digits(return_X_y=True)


def picture(rng, pool):
    """Return a canvas of 48 to 80 pixels a side, and a list of boxes [left, top, right, bottom, class]."""
    height, width = rng.integers(48, 81, 2)
    canvas = rng.integers(0, 40, (height, width)).astype(np.uint8)
    boxes = []
    for _ in range(40):
        if len(boxes) == pool[0]:
            break
        number, size = rng.choice(pool[1]), 16
        top, left = rng.integers(0, height - size), rng.integers(0, width - size)
        if any(abs(left - x) < size + 2 and abs(top - y) < size + 2 for x, y, *_ in boxes):
            continue
        digit = np.kron(IMAGES[number].reshape(8, 8) * 15.9, np.ones((2, 2))).astype(np.uint8)
        canvas[top : top + size, left : left + size] = np.maximum(canvas[top : top + size, left : left + size], digit)
        boxes.append([left, top, left + size, top + size, LABELS[number]])
    return canvas, boxes


def png(canvas):
    held = io.BytesIO()
    Image.fromarray(canvas).save(held, "PNG")
    return held.getvalue()


def write(folder, rows, numbers, seed):
    """Write `rows` pictures of one to four digits, taken from the digits with these numbers."""
    rng = np.random.default_rng(seed)
    made = [picture(rng, (rng.integers(1, 5), numbers)) for _ in range(rows)]
    table = pa.table(
        {
            "image": pa.array([png(canvas) for canvas, _ in made], pa.binary()),
            "boxes": pa.array([boxes for _, boxes in made], pa.list_(pa.list_(pa.float32(), 5))),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "part-0.parquet")


if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    write(Path("data/train"), rows, np.arange(1500), 0)
    write(Path("data/test"), rows // 5, np.arange(1500, len(LABELS)), 1)
