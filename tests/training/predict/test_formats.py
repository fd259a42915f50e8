"""Rows of every format of files are scored: each by its own values, with the file and the row that it is from."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from penstock.ingest.formats.registry import FORMATS, format_named
from penstock.training.registry.loaded_model import LoadedModel
from tests.ingest.formats.containers import test_containers as containers
from tests.ingest.preparing import Source
from tests.ingest.reading import write_files
from tests.training.predict.test_score import Work, made_model

Rows = Mapping[str, list[Any]]

CODE = """\
import numpy as np


def loudness(batch):
    return {"label": batch["label"], "loud": np.array([np.abs(sound).mean() for sound in batch["audio"]], np.float32)}


def numbers(batch):
    return {"x": np.array([int(line) for line in batch["text"]], np.float32)}
"""


class Case(NamedTuple):
    """How files of a format are written, and trained on.

    Attributes:
        files: of one name and some rows.
        features: columns of the rows that the model is given.
    """

    files: Callable[[str, Rows], Mapping[str, bytes]]
    features: tuple[str, ...] = ("x", "y")
    steps: tuple[Any, ...] = ("label_encoder",)
    data: Mapping[str, Any] = {}


def rows_from(first: int, count: int) -> Rows:
    numbers = range(first, first + count)
    return {
        "x": list(numbers),
        "y": [number / 4 for number in numbers],
        "kind": [("no", "yes")[number % 2] for number in numbers],
    }


def as_arrow(rows: Rows) -> bytes:
    sink, table = io.BytesIO(), pa.table(dict(rows))
    with ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def as_tfrecord(rows: Rows) -> bytes:
    lines = zip(rows["x"], rows["y"], rows["kind"], strict=True)
    return containers.as_tfrecord([{"x": [x], "y": [y], "kind": [kind.encode()]} for x, y, kind in lines])


def as_samples(rows: Rows) -> bytes:
    members: dict[str, bytes] = {}
    for number in rows["x"]:
        members |= {f"{number:03}.png": containers.png(number), f"{number:03}.cls": b"%d" % (number % 2)}
    return containers.tar_of(members)


def as_sounds(name: str, rows: Rows) -> Mapping[str, bytes]:
    soundfile = pytest.importorskip("soundfile")
    files = {}
    for number, kind in zip(rows["x"], rows["kind"], strict=True):
        sink = io.BytesIO()
        soundfile.write(sink, np.full(20 + number, number / 64, np.float32), 8000, format="WAV")
        files[f"{kind}/{name}-{number:03}.wav"] = sink.getvalue()
    return files


def as_lines(rows: Rows) -> bytes:
    return "".join(f"{number}\n" for number in rows["x"]).encode()


def as_saved_dataset(name: str, rows: Rows) -> Mapping[str, bytes]:
    """A shard, and the state that names all there are."""
    sink, table = io.BytesIO(), pa.table(dict(rows))
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    shards = [f"data-{each}.arrow" for each in (("a", "b") if name == "b" else (name,))]
    state = json.dumps({"_data_files": [{"filename": shard} for shard in shards]}).encode()
    return {f"data-{name}.arrow": sink.getvalue(), "state.json": state}


def one_file(extension: str, write: Callable[[Rows], bytes]) -> Callable[[str, Rows], Mapping[str, bytes]]:
    return lambda name, rows: {f"{name}.{extension}": write(rows)}


CASES = {
    "arrow": Case(one_file("arrow", as_arrow)),
    "numpy": Case(one_file("npz", containers.as_npz)),
    "excel": Case(one_file("xlsx", containers.as_excel)),
    "orc": Case(one_file("orc", containers.as_orc)),
    "avro": Case(one_file("avro", containers.as_avro)),
    "tfrecord": Case(one_file("tfrecord", as_tfrecord), data={"types": {"kind": "string"}}),
    "huggingface": Case(as_saved_dataset),
    "text": Case(one_file("txt", as_lines), ("text",), ({"map_batches": "code.py:numbers"},), {"label": None}),
    "webdataset": Case(one_file("tar", as_samples), ("image",), (), {"label": "cls", "images": {"mode": "L"}}),
    "audio": Case(
        as_sounds, ("audio", "sample_rate", "path"), ({"map_batches": "code.py:loudness"}, "label_encoder"), {"label": "label"}
    ),
}


@pytest.mark.parametrize("format", CASES)
def test_every_format_is_scored_with_file_and_row(tmp_path: Path, format: str) -> None:
    case = CASES[format]
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "code.py").write_text(CODE)
    data: dict[str, Any] = {"format": format, "label": "kind", "test": {"fraction": 0.4}, **case.data}

    def source(folder: Path) -> Source:
        files = case.files("a", rows_from(0, 40))
        return Source.of(folder, {f"train/{name}": content for name, content in files.items()}, case.steps, **data)

    work = Work(tmp_path, made_model(tmp_path, source))
    expected: list[dict[str, Any]] = []
    for name, rows in (("a", rows_from(3, 9)), ("b", rows_from(50, 4))):
        files = case.files(name, rows)
        write_files(work.input, files)
        (written,) = files if len(files) == 1 else [None]
        for row, (number, kind) in enumerate(zip(rows["x"], rows["kind"], strict=True)):
            sound = format == "audio"
            file = f"{kind}/{name}-{number:03}.wav" if sound else written or f"data-{name}.arrow"
            values = {
                "x": number,
                "y": number / 4,
                "image": {"bytes": containers.png(number), "path": None},
                "audio": [number / 64] * (20 + number),
                "sample_rate": 8000,
                "path": file,
                "text": str(number),
            }
            expected.append({"file": file, "row": 0 if sound else row, **{each: values[each] for each in case.features}})
    scored = work.run()
    assert (scored.rows, scored.unscored, work.run().units) == (13, 0, 0)
    expected.sort(key=lambda each: (each["file"], each["row"]))
    found = work.rows()
    assert found.select(["file", "row"]).to_pylist() == [{"file": each["file"], "row": each["row"]} for each in expected]
    answer = LoadedModel(work.model).predict([{name: each[name] for name in case.features} for each in expected])
    last = list(answer)[-1]
    assert np.allclose(np.array(found[last].to_pylist()), np.array(answer[last].tolist()), atol=1e-6)
    assert len({str(each) for each in answer[last]}) > 6, "else the answer of another row would pass"


def test_every_file_format_is_covered() -> None:
    files = {name for name in FORMATS.names if not format_named(name).is_kept}
    elsewhere = {"parquet", "csv", "json", "images"}
    assert elsewhere | CASES.keys() == files
