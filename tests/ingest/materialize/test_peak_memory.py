"""How much memory a worker takes does not grow with what it prepares: docs/formats.md states the bound."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
from PIL import Image

_CHILD = """
import sys
from pathlib import Path
from penstock.ingest.spec import MaterializeSpec
from tests.ingest.preparing import Source

def kilobytes(name):
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])

steps = [{"drop": ["label"]}] if sys.argv[2] in ("audio", "images") else []
dealt = {"validation": {"fraction": 0.2}} if sys.argv[3:] else {}
source = Source.of(Path(sys.argv[1]), steps=steps, format=sys.argv[2], **dealt)
before = kilobytes("VmRSS")
rows = source.materialize(spec=MaterializeSpec()).rows
print(sum(rows.values()), (kilobytes("VmHWM") - before) // 1000)
"""


def numbers(folder: Path, rows: int) -> str:
    rng = np.random.default_rng(0)
    table = pa.table({f"x{at}": rng.integers(0, 100, rows).astype(np.float32) for at in range(28)})
    pq.write_table(table, folder / "rows.parquet", row_group_size=50_000)
    return "parquet"


def text(folder: Path, rows: int) -> str:
    rng = np.random.default_rng(0)
    arrow_csv.write_csv(pa.table({f"x{at}": rng.integers(0, 99, rows) for at in range(28)}), folder / "rows.csv")
    return "csv"


def blobs(folder: Path, rows: int) -> str:
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows << 18, np.uint8)), 1 << 18)
    pq.write_table(pa.table({"blob": values}), folder / "rows.parquet", use_dictionary=False)
    return "parquet"


def long_rows(folder: Path, rows: int) -> str:
    """32 MB each, in one row group, and dealt to splits by their hash."""
    values = pa.array(np.random.default_rng(0).standard_normal(rows << 23, np.float32))
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(values, 1 << 23)})
    pq.write_table(table, folder / "rows.parquet", use_dictionary=False)
    return "parquet"


def photos(folder: Path, rows: int) -> str:
    """36 MB each when decoded, and no size is stated."""
    held = io.BytesIO()
    Image.new("RGB", (4000, 3000), (200, 30, 60)).save(held, "JPEG")
    (folder / "a").mkdir()
    for row in range(rows):
        (folder / "a" / f"{row}.jpg").write_bytes(held.getvalue())
    return "images"


def sounds(folder: Path, rows: int) -> str:
    """A minute of two channels each: 10.6 MB of samples, in 90 kB."""
    soundfile = pytest.importorskip("soundfile")
    (folder / "a").mkdir()
    for row in range(rows):
        soundfile.write(folder / "a" / f"{row}.flac", np.full((60 * 44_100, 2), row, np.int16), 44_100)
    return "audio"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(
    ("write", "rows", "bound_mb"),
    [
        pytest.param(photos, 24, 500, id="864 MB of photos"),
        pytest.param(long_rows, 16, 460, id="512 MB of rows of 32 MB"),
        pytest.param(sounds, 40, 500, id="420 MB of sounds", marks=pytest.mark.drill),
        pytest.param(blobs, 1600, 768, id="420 MB of blobs of 256 KB", marks=pytest.mark.drill),
        pytest.param(numbers, 3_000_000, 500, id="one Parquet file of 340 MB", marks=pytest.mark.drill),
        pytest.param(text, 500_000, 500, id="one CSV file", marks=pytest.mark.drill),
    ],
)
def test_worker_memory_is_within_documented_limit(
    tmp_path: Path, write: Callable[[Path, int], str], rows: int, bound_mb: int
) -> None:
    (tmp_path / "train").mkdir()
    format = write(tmp_path / "train", rows)
    dealt = ["dealt"] if write is long_rows else []
    run = subprocess.run([sys.executable, "-c", _CHILD, str(tmp_path), format, *dealt], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    read, peak_mb = map(int, run.stdout.split())
    assert read == rows
    assert peak_mb < bound_mb, peak_mb
