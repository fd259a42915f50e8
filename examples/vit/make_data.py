"""Write scikit-learn's digits in the form of CIFAR-10: colour pictures of 32 by 32 pixels, and their classes, as Parquet."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits


def write(folder, rows, first, end, seed):
    """Write `rows` pictures of the digits from `first` to `end`, each in a colour and at a place of its own."""
    rng = np.random.default_rng(seed)
    digits, labels = load_digits(return_X_y=True)
    chosen = rng.integers(first, end, rows)
    image = np.full((rows, 32, 32, 3), 30, np.uint8) + rng.integers(0, 60, (rows, 32, 32, 3), dtype=np.uint8)
    for row, number in enumerate(chosen):
        top, left = rng.integers(0, 9, 2)
        large = np.kron(digits[number].reshape(8, 8) / 16, np.ones((3, 3)))[..., None] * rng.integers(100, 166, 3)
        image[row, top : top + 24, left : left + 24] += large.astype(np.uint8)
    pixels = pa.FixedShapeTensorArray.from_numpy_ndarray(image)
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": pixels, "label": labels[chosen].astype(np.int64)}), folder / "part-0.parquet")


if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    write(Path("data/train"), rows, 0, 1500, 0)
    write(Path("data/valid"), rows // 5, 1500, 1797, 1)
