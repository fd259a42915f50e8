"""How are rows from elsewhere, such as those that a program holds, written as Arrow files, which are read like any others?"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from penstock.digest import bytes_digest, stream_digest
from penstock.errors import DataError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.formats.given import GIVEN, is_ray_dataset, tables_of
from penstock.ingest.ray_tasks import raising_ours
from penstock.messages import shorten
from penstock.storage import Storage

__all__ = ["keep_object", "write_rows"]

PART_BYTES = 32 << 20
"""About what a file holds: what is in memory at once, and what one worker prepares."""


def keep_object(value: Any, storage: Storage, name: str) -> str:
    """Write rows that a program holds, unless equal ones are there, and return the URI of their folder.

    Args:
        name: what the rows are called in messages.

    Raises:
        DataError: it does not hold rows.
    """
    if is_ray_dataset(value):
        return _keep_dataset(value, storage, name)
    with tempfile.TemporaryDirectory(prefix="penstock-rows-") as made:  # an iterator gives its rows once
        digests = write_rows(Storage(made), "part", value, name)
        if not digests:
            raise _no_rows(name)
        folder = f"sources/{stream_digest(digests)}"
        if not storage.exists(f"{folder}/done.json"):
            for file in sorted(Path(made).iterdir()):
                storage.put_file(file, f"{folder}/rows/{file.name}")
            storage.write_json(f"{folder}/done.json", {"version": 1, "target": name, "rows_in": "rows"})
    return storage.uri(f"{folder}/rows")


def _keep_dataset(dataset: Any, storage: Storage, name: str) -> str:
    """Do as `keep_object` with a lazy `ray.data.Dataset`, whose rows are known only once they are written."""
    folder = f"sources/ray-{uuid.uuid4().hex}"
    try:
        digests = write_rows(storage, f"{folder}/rows/part", dataset, name)
    except BaseException:  # a large dataset that fails again and again would fill the storage
        storage.delete(folder)
        raise
    if not digests:
        raise _no_rows(name)
    digest = stream_digest(digests)
    for other in storage.list("sources"):
        done = f"sources/{other}/done.json"
        if other.startswith("ray-") and storage.exists(done) and storage.read_json(done)["digest"] == digest:
            storage.delete(folder)
            return storage.uri(f"sources/{other}/rows")
    storage.write_json(f"{folder}/done.json", {"version": 1, "target": name, "rows_in": "rows", "digest": digest})
    return storage.uri(f"{folder}/rows")


def _no_rows(name: str) -> DataError:
    return DataError(f"{name} gave no rows", next_step=f"give it one row or more, as {GIVEN}")


def write_rows(storage: Storage, path: str, value: Any, name: str) -> list[bytes]:
    """Write rows as files whose names begin with `path`; return the digest of each, in their order."""
    if is_ray_dataset(value):
        return _write_dataset(storage, path, value, name)
    digests = []
    for number, part in enumerate(_parts(value, name)):
        storage.write_bytes(f"{path}-{number:05d}.arrow", part)
        digests.append(bytes.fromhex(bytes_digest(part)))
    return digests


def _write_dataset(storage: Storage, path: str, dataset: Any, name: str) -> list[bytes]:
    """Do it in tasks of the dataset's own cluster: a file a block, in the order of the blocks. No rows come here."""
    from ray.data import Datasink
    from ray.data.block import BlockAccessor

    class Files(Datasink[Any]):
        def write(self, blocks: Iterable[Any], ctx: Any) -> Any:
            tables = (_table(BlockAccessor.for_block(block).to_arrow(), name, ctx.task_idx) for block in blocks)
            parts = (_file([table]) for table in tables if table.num_rows)
            return ctx.task_idx, [put(f"{path}-{ctx.task_idx:06d}-{at:04d}.arrow", part) for at, part in enumerate(parts)]

        def on_write_complete(self, result: Any) -> None:
            written.extend(result.write_returns)

    def put(file: str, part: pa.Buffer) -> bytes:
        storage.write_bytes(file, part)
        return bytes.fromhex(bytes_digest(part))

    written: list[tuple[int, list[bytes]]] = []
    options, bars = dataset.context.execution_options, dataset.context.enable_progress_bars
    before = options.preserve_order
    options.preserve_order, dataset.context.enable_progress_bars = True, False
    try:
        with raising_ours():
            dataset.write_datasink(Files())
    finally:
        options.preserve_order, dataset.context.enable_progress_bars = before, bars
    folder, _, _ = path.rpartition("/")
    counted = {f"{path}-{task:06d}-{at:04d}.arrow" for task, digests in written for at in range(len(digests))}
    for file in {f"{folder}/{name}" for name in storage.list(folder)} - counted:
        storage.delete(file)  # of a task that died and was retried, and then gave fewer blocks
    return [digest for _, digests in sorted(written) for digest in digests]


def _parts(value: Any, name: str) -> Iterator[pa.Buffer]:
    """Arrow files of about `PART_BYTES`, each of one schema."""
    held: list[pa.Table] = []
    for number, each in enumerate(tables_of(value)):
        table = _table(each, name, number)
        if not table.num_rows:
            continue
        if held and (table.schema != held[0].schema or sum(part.nbytes for part in held) >= PART_BYTES):
            yield _file(held)
            held = []
        held.append(table)
    if held:
        yield _file(held)


def _file(tables: list[pa.Table]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table, max_chunksize=65536)
    return sink.getvalue()


def _table(value: Any, name: str, number: int) -> pa.Table:
    where = f"{name}: table {number} (from 0)"
    try:
        if isinstance(value, pa.RecordBatch):
            value = pa.Table.from_batches([value])
        elif isinstance(value, np.ndarray) and value.dtype.names:
            value = {field: value[field] for field in value.dtype.names}
        elif type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns"):
            value = _of_pandas(value, where)
        if isinstance(value, Mapping):
            value = pa.table({column: _column(array, f"{where}, column {column!r}") for column, array in value.items()})
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise _not_arrow(where, error) from error
    if not isinstance(value, pa.Table):
        raise DataError(
            f"{name} gave a {type(value).__name__} ({shorten(value)}), which are not rows",
            next_step=f"let it return or yield {GIVEN}",
        )
    for field in value.schema:
        if getattr(field.type, "extension_name", "") == "ray.data.arrow_pickled_object":
            raise DataError(
                f"{where}, column {field.name!r} holds Python objects, which are not values of a table",
                next_step="give the column one type, such as numbers, text or arrays of one shape",
            )
    return value.replace_schema_metadata(None)


def _not_arrow(where: str, error: Exception) -> DataError:
    shown = " ".join(str(error).split())
    return DataError(
        f"{where} does not become Arrow: {shown}", next_step="give each column one type and all columns as many rows"
    )


def _of_pandas(frame: Any, where: str) -> pa.Table:
    index = frame.index
    if any(name is not None for name in index.names):
        raise ValueError(f"the index {list(index.names)} would be lost; call reset_index() to make it columns")
    table = pa.Table.from_pandas(frame, preserve_index=False)
    for position, name in enumerate(table.column_names):
        if str(frame.dtypes.iloc[position]) == "object":
            _refuse_other_times(frame.iloc[:, position], table.column(position), f"{where}, column {name!r}")
    return table


def _column(values: Any, where: str) -> pa.Array:
    """Return an array [rows, ...] as a column: of more than one dimension as tensors of a fixed shape."""
    if isinstance(values, np.ndarray) and values.ndim > 1:
        if np.ma.is_masked(values):
            raise ValueError("a masked array of several dimensions would lose its mask; fill it, or give lists with None")
        return tensor_array(values)
    of_objects = isinstance(values, list | tuple) or str(getattr(values, "dtype", "")) == "object"
    if of_objects and any(np.ma.is_masked(value) for value in values):
        raise ValueError("masked arrays in a list would lose their masks; fill them, or give lists with None")
    try:
        column = pa.array(values)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise _not_arrow(where, error) from error
    if of_objects:
        _refuse_other_times(values, column, where)
    return column


def _refuse_other_times(values: Iterable[Any], column: pa.Array | pa.ChunkedArray, where: str) -> None:
    """Refuse days beside times, times with and without a zone, and nanoseconds, of which pyarrow keeps what fits the first."""
    if "date" not in str(column.type) and "timestamp" not in str(column.type):
        return
    for row, (value, made) in enumerate(zip(values, column.to_pylist(), strict=True)):
        if made is not None and not isinstance(value, np.ndarray) and value != made:
            raise DataError(
                f"{where}, row {row} holds {value!r}, which would become {made!r}",
                next_step="give the column one kind of times, all with a zone or all without",
            )
