"""Rows that a function gives, or a program holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from PIL import Image

from penstock.errors import DataError, PenstockError
from penstock.ingest.files.listing import list_source
from penstock.ingest.formats.arrow_files import keep_object
from penstock.ingest.formats.registry import format_of
from penstock.ingest.formats.section import spec_class_for
from penstock.ingest.read.snapshot import iterate_rows, read_source
from penstock.progress import silent
from penstock.storage import Storage
from tests import ROOT
from tests.ingest.preparing import transform_table

EVERYTHING = """
import numpy as np, pandas as pd, pyarrow as pa

def rows(start=0):
    with open(__import__("os").environ["CALLS"], "a") as calls:
        calls.write("x")
    yield pd.DataFrame({"x": [start, start + 1], "name": ["a", None]})
    yield pa.table({"x": [start + 2], "name": ["c"]})
    yield {"x": np.array([start + 3]), "name": np.array(["d"], object)}
    yield np.array([(start + 4, "e")], [("x", "i8"), ("name", "U1")])
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def read(folder: Path, source: str, **options: Any) -> pa.Table:
    (folder / "source.py").write_text(source)
    section = {"format": "python", "train": "source.py:rows", "python": options}
    data = spec_class_for(section).model_validate(section)
    files = format_of(data).listing(data, folder, Storage(str(folder / "storage"))).files
    snapshot = read_source(data, files, silent)
    return pa.concat_tables(batch.table for batch in iterate_rows(data, snapshot, snapshot.files))


def test_a_function_may_give_pandas_arrow_and_numpy_and_is_asked_once(tmp_path: Path, calls: Path) -> None:
    for _ in range(2):
        assert read(tmp_path, EVERYTHING).to_pydict() == {"x": [0, 1, 2, 3, 4], "name": ["a", None, "c", "d", "e"]}
    assert calls.read_text() == "x"
    read(tmp_path, "# moved\n" + EVERYTHING)
    assert calls.read_text() == "x", "what it reaches is the same"
    assert read(tmp_path, EVERYTHING, params={"start": 7})["x"].to_pylist() == [7, 8, 9, 10, 11]
    read(tmp_path, EVERYTHING, fingerprint="2026-11")
    read(tmp_path, EVERYTHING.replace("start + 4", "start + 5"))
    assert calls.read_text() == "xxxx"


def test_a_fingerprint_may_be_a_function_that_is_asked_each_time(tmp_path: Path, calls: Path) -> None:
    source = EVERYTHING + "\ndef version():\n    return open('" + str(tmp_path / "version") + "').read()\n"
    for version, expected in (("1", "x"), ("1", "x"), ("2", "xx")):
        (tmp_path / "version").write_text(version)
        read(tmp_path, source, fingerprint="source.py:version")
        assert calls.read_text() == expected


def test_rows_that_take_long_are_said_to_be_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.progress._SILENCE_S", 0.0)
    source = """
import threading

def rows():
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer) and not thread.interval:
            thread.join()
    return {"x": [1]}
"""
    read(tmp_path, source)
    assert "waiting for the rows of 'source.py:rows', which are copied to the storage once" in capsys.readouterr().err


_HEAD = """import datetime as dt
import numpy as np
import pandas as pd
D = dt.datetime(2020, 1, 1, 17)
"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "gave a int .*are not rows"),
        ("return iter(())", "holds no rows"),
        ("yield {'x': [1, 'a']}", "table 0 .*, column 'x' does not become Arrow"),
        ("yield {'x': [2**64]}", "column 'x' does not become Arrow: Python int too large"),
        ("yield {'x': [D.date(), D]}", r"column 'x', row 1 holds .*17.*, which would become datetime.date\("),
        ("yield {'x': [D, D.replace(tzinfo=dt.UTC)]}", "column 'x', row 1 holds .*utc"),
        ("yield {'x': [[D, D.replace(tzinfo=dt.UTC)]]}", "column 'x', row 0 holds .*utc"),
        ("yield {'x': [pd.Timestamp('2020-01-01 00:00:00.123456789')]}", "column 'x', row 0 holds .*456789"),
        ("yield pd.DataFrame({'x': pd.Series([D.date(), D], dtype=object)})", "column 'x', row 1 holds"),
        ("yield {'x': np.ma.array([[1, 2]], mask=[[0, 1]])}", "would lose its mask"),
        ("yield {'x': [np.ma.array([1, 2], mask=[0, 1])]}", "would lose their masks"),
        ("yield pd.DataFrame({'x': [1]}, index=pd.Index([7], name='id'))", r"index \['id'\] would be lost; call reset_index"),
        ("raise KeyError('gone')", r"source.py:rows raised KeyError: 'gone' \(.*source.py, line 6\)"),
    ],
)
def test_what_is_no_rows_is_refused_by_name(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, f"{_HEAD}def rows():\n    {body}\n")
    with pytest.raises(PenstockError, match=r"source\.py"):
        read(tmp_path, "def others():\n    pass\n")


def test_shapes_and_types_come_out_as_they_went_in(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    given = {"image": images, "at": np.array(["2026-01-01", "2027-01-01"], "M8[ns]"), "y": np.array([1, 2], np.int16)}
    uri = keep_object(given, storage, "train")
    section = {"format": "arrow", "train": uri}
    data = spec_class_for(section).model_validate(section)
    snapshot = read_source(data, list_source(data, tmp_path, (".arrow",)).files, silent)
    (batch,) = iterate_rows(data, snapshot, snapshot.files)
    assert np.array_equal(batch.table["image"].combine_chunks().to_pylist(), images.reshape(2, 12))
    assert batch.table.schema.field("y").type == pa.int16()
    assert batch.table["at"].to_pylist() == [pd.Timestamp("2026-01-01"), pd.Timestamp("2027-01-01")]
    assert keep_object(given, storage, "train") == uri
    assert keep_object({**given, "y": np.array([1, 3], np.int16)}, storage, "train") != uri
    assert keep_object(iter([given]), storage, "train") == uri
    times = {"t": [pd.Timestamp("2020-01-01", tz="Europe/Rome"), None], "d": [pd.Timestamp("2020-01-01").date(), None]}
    keep_object(times, storage, "train")


@pytest.mark.drill
def test_a_ray_dataset_is_read_and_ray_ends_with_it(tmp_path: Path) -> None:
    """In a process of its own: the one of the tests may hold a Ray that other tests share."""
    source = "import ray\ndef rows():\n ray.init('local', num_cpus=1, include_dashboard=False)\n return ray.data.range(1000)\n"
    (tmp_path / "source.py").write_text(source)
    script = (
        "import sys; from pathlib import Path; folder = Path(sys.argv[1])\n"
        "from tests.ingest.formats.sources.test_python import read\n"
        "rows = read(folder, (folder / 'source.py').read_text())['id'].to_pylist(); import ray\n"
        "print(sorted(rows) == list(range(1000)), ray.is_initialized())\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "False"], done.stderr[-3000:]


def test_the_page_pairs_images_with_masks_of_another_folder(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8").split("## Masks in a folder of their own")[1]
    spec = yaml.safe_load(section.split("```yaml\n")[1].split("```")[0])["data"]
    source = section.split("```python\n")[1].split("```")[0]
    for folder in ("images", "masks"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (80, 90), (number, 0, 0)).save(tmp_path / "data" / "images" / f"{number}.jpg")
        Image.new("L", (80, 90), number % 3).save(tmp_path / "data" / "masks" / f"{number}.png")

    def prepared() -> pa.Table:
        (tmp_path / "source.py").write_text(source)
        data = spec_class_for(spec).model_validate(spec)
        snapshot = read_source(data, format_of(data).listing(data, tmp_path, Storage(str(tmp_path / "storage"))).files, silent)
        rows = pa.concat_tables(batch.table for batch in iterate_rows(data, snapshot, snapshot.files))
        return transform_table(rows, [{"drop": ["name"]}], label="mask", images=spec["images"])

    table = prepared()
    masks = table["mask"].combine_chunks().to_numpy_ndarray()
    assert masks.shape == (5, 64, 64) and [int(mask.max()) for mask in masks] == [0, 1, 2, 0, 1]
    assert table["image"].combine_chunks().to_numpy_ndarray().shape == (5, 64, 64, 3)
    Image.new("L", (80, 90), 7).save(tmp_path / "data" / "masks" / "4.png")
    assert prepared()["mask"].combine_chunks().to_numpy_ndarray().max() == 7, "a file that was replaced is read again"
    (tmp_path / "data" / "masks" / "2.png").unlink()
    with pytest.raises(DataError, match=r"source\.py:pairs raised FileNotFoundError.*masks/2\.png"):
        prepared()


def test_a_changed_file_of_code_files_calls_the_function_again(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text(
        "from pathlib import Path\n\ndef rows():\n"
        "    yield {'x': [int(file.read_text()) for file in Path(__file__).parent.glob('*.num')]}\n"
    )
    section = {"format": "python", "train": "source.py:rows"}
    data = spec_class_for(section).model_validate(section)
    for number in (1, 2):
        (tmp_path / "a.num").write_text(str(number))
        files = format_of(data).listing(data, tmp_path, Storage(str(tmp_path / "storage")), code_files=["a.num"]).files
        snapshot = read_source(data, files, silent)
        assert [batch.table["x"].to_pylist() for batch in iterate_rows(data, snapshot, snapshot.files)] == [[number]]
