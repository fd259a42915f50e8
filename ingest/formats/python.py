"""How do rows that a function gives, or a program holds, become files? Written once as Arrow, they are read like any other.

So every process reads the same rows, however often and on whatever machine, and a function that gives others the next time is
noticed by its rows rather than in the middle of a training.
"""

from __future__ import annotations

import sys
import traceback
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
from pydantic import Field

from penstock.config import Section
from penstock.digest import bytes_digest, digest_of, stream_digest
from penstock.errors import DataError, PenstockError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.formats.arrow import ArrowReader
from penstock.ingest.formats.format import Format
from penstock.ingest.schema import SPLITS
from penstock.ingest.spec import DataSpec
from penstock.messages import shorten
from penstock.storage import Storage
from penstock.usercode.capture import UserCode, capture

__all__ = ["PythonFormat", "PythonOptions", "keep_object", "keep_rows"]


PART_BYTES = 32 << 20
"""About what a file holds: what is in memory at once, and what one worker prepares."""

_TAKEN = "pandas DataFrames, Arrow tables or record batches, dicts of arrays, structured numpy arrays, or a ray.data.Dataset"


class PythonOptions(Section):
    """How the function of `data.train` is called, and when again.

    `train: source.py:rows` names a function that returns or yields pandas DataFrames, Arrow tables or record batches, dicts of
    column to array [rows, ...], or structured numpy arrays; or that returns a `ray.data.Dataset`, and with it whatever Ray Data
    reads. Its rows are written to the storage once, and again when the code it reaches, its params or the fingerprint change.
    """

    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the call."""
    fingerprint: str = ""
    """What the rows depend on besides the code, such as a date or a table's version: another text, other rows. Of the form
    `source.py:version` it is a function, which is called with the params each time and says the text."""


class PythonFormat(Format):
    """Rows that a function gives: `train: source.py:rows`. `penstock.run(file, data={"train": frame})` needs no function."""

    extensions = (".arrow",)
    from_code = True
    Options = PythonOptions

    def reader(self, data: DataSpec, options: PythonOptions) -> ArrowReader:
        """Read the files that the rows were written to."""
        return ArrowReader()


def keep_rows(data: DataSpec, base_dir: Path, storage: Storage) -> DataSpec:
    """The same section with functions replaced by the folders that hold their rows; runs those whose rows are not kept yet.

    Args:
        base_dir: the folder of the pipeline file, where the functions are looked for.
        storage: gets the rows below `sources/`.

    Raises:
        SpecError: there is no such function.
        DataError: it raises, or gives something that is no rows.
    """
    options: PythonOptions = data.__dict__.get("python") or PythonOptions()
    kept: dict[str, str] = {}
    for split in SPLITS:
        target = getattr(data, split)
        if isinstance(target, str):
            code = capture(target, base_dir, options.params)
            said = _fingerprint(options, base_dir)
            folder = f"sources/{digest_of([code.digest, options.model_dump(mode='json')['params'], said])}"
            if not storage.exists(f"{folder}/done.json"):
                # The note that names the rows is written last: of two processes that ask at once each writes rows of its own.
                attempt = uuid.uuid4().hex
                with _naming(code), _ray_ends_again():
                    _write(storage, f"{folder}/{attempt}", _parts(code.function()(**options.params), target))
                storage.write_json(f"{folder}/done.json", {"version": 1, "target": target, "rows_in": attempt})
            kept[split] = storage.uri(f"{folder}/{storage.read_json(f'{folder}/done.json')['rows_in']}")
    return data.model_copy(update=kept)


def keep_object(value: Any, storage: Storage, name: str) -> str:
    """Write rows that a program holds, unless equal ones are there, and return the URI of their folder.

    Args:
        name: what the rows are called in messages.

    Raises:
        DataError: it is no rows.
    """
    digest = stream_digest(bytes.fromhex(bytes_digest(part)) for part in _parts(value, name))
    folder = f"sources/{digest}"
    if not storage.exists(f"{folder}/done.json"):
        _write(storage, f"{folder}/rows", _parts(value, name))
        storage.write_json(f"{folder}/done.json", {"version": 1, "target": name, "rows_in": "rows"})
    return storage.uri(f"{folder}/rows")


def _fingerprint(options: PythonOptions, base_dir: Path) -> str:
    if ":" not in options.fingerprint:
        return options.fingerprint
    code = capture(options.fingerprint, base_dir, options.params)
    with _naming(code):
        return str(code.function()(**options.params))


@contextmanager
def _naming(code: UserCode) -> Iterator[None]:
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # the user's code: any error is reported with its place
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{code.target} raised {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})",
            next_step=f"correct {code.target}",
        ) from error


@contextmanager
def _ray_ends_again() -> Iterator[None]:
    """A Ray that the function has started, as most of Ray Data does, would be in the way of the run's own."""
    before = _ray_runs()
    try:
        yield
    finally:
        if not before and _ray_runs():
            sys.modules["ray"].shutdown()


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def _write(storage: Storage, folder: str, parts: Iterable[pa.Buffer]) -> None:
    for number, part in enumerate(parts):
        storage.write_bytes(f"{folder}/part-{number:05d}.arrow", part)


def _parts(value: Any, name: str) -> Iterator[pa.Buffer]:
    """Arrow files of about `PART_BYTES`, each of one schema."""
    held: list[pa.Table] = []
    for number, each in enumerate(_each(value)):
        table = _table(each, name, number)
        if held and (table.schema != held[0].schema or sum(part.nbytes for part in held) >= PART_BYTES):
            yield _file(held)
            held = []
        held.append(table)
    if not held:
        raise DataError(f"{name} gave no rows", next_step=f"let it return or yield {_TAKEN}")
    yield _file(held)


def _file(tables: list[pa.Table]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table, max_chunksize=65536)
    return sink.getvalue()


def _each(value: Any) -> Iterable[Any]:
    if type(value).__module__.partition(".")[0] == "ray" and hasattr(value, "iter_batches"):
        return value.iter_batches(batch_size=65536, batch_format="pyarrow")  # type: ignore[no-any-return]
    whole = hasattr(value, "columns") or isinstance(value, Mapping | np.ndarray | str | bytes)
    return [value] if whole or not isinstance(value, Iterable) else value


def _table(value: Any, name: str, number: int) -> pa.Table:
    try:
        if isinstance(value, pa.RecordBatch):
            value = pa.Table.from_batches([value])
        elif isinstance(value, np.ndarray) and value.dtype.names:
            value = {field: value[field] for field in value.dtype.names}
        elif type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns"):
            value = _of_pandas(value)
        if isinstance(value, Mapping):
            value = pa.table({column: _column(array) for column, array in value.items()})
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"{name}: table {number} (from 0) does not become Arrow: {' '.join(str(error).split())}",
            next_step="give each column one type and all columns as many rows",
        ) from error
    if not isinstance(value, pa.Table):
        raise DataError(
            f"{name} gave a {type(value).__name__} ({shorten(value)}), which is no rows",
            next_step=f"let it return or yield {_TAKEN}",
        )
    return value.replace_schema_metadata(None)


def _of_pandas(frame: Any) -> pa.Table:
    index = frame.index
    if any(name is not None for name in index.names):
        raise ValueError(f"the index {list(index.names)} would be lost; call reset_index() to make it columns")
    return pa.Table.from_pandas(frame, preserve_index=False)


def _column(values: Any) -> pa.Array:
    """An array [rows, ...] as a column: of more than one dimension as tensors of a fixed shape."""
    if isinstance(values, np.ndarray) and values.ndim > 1:
        return tensor_array(values)
    return pa.array(values)
