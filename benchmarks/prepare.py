"""What does preparing rows cost beside a pyarrow program written by hand, and does its memory grow with the input?

    python -m benchmarks.prepare [--rounds 5] [--out benchmarks/results] [--format csv]

Eight Parquet files of 250,000 rows, 28 float32 columns and a label; with --format csv or json a tenth of the rows as text, and
the result in `prepare_csv.json`. All variants learn mean and deviation of every column, scale, join the columns to one of 28
numbers, and write Arrow files, in two processes that run already. penstock also looks for values that are missing or not
finite, settles on types (of text that takes all of it), assigns splits, hashes what it writes and commits each unit. A round
measures every variant. Digests of the source files are remembered from a run that warms all up, as they are between real runs.
With --format one, 12,000,000 rows in eight Parquet files are the first variant, and the same rows in one file the other.
Memory: the peak of a process that does all of it to one file of a given size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.json as arrow_json
import pyarrow.parquet as pq

from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, rows_per_s, save
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.files.listing import list_source
from penstock.ingest.formats.registry import format_of
from penstock.ingest.materialize.build import materialize
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.preprocess.fit import fit_preprocess
from penstock.ingest.ray_tasks import ParallelMap, local_map, ray_map
from penstock.ingest.read.inspection import is_much
from penstock.ingest.read.parsed.rows import forget_parsed
from penstock.ingest.read.snapshot import read_source
from penstock.ingest.spec import MaterializeSpec
from penstock.progress import silent
from penstock.storage import Storage
from penstock.tasks.spec import PipelineSpec

COLUMNS, FILES, FILE_ROWS, CHUNK = 28, 8, 250_000, 50_000
TEXT_PART = 10
"""Text has one row of so many."""

ONE_FILE_ROWS = 12_000_000

BY_HAND, POLARS = "by hand, pyarrow in two processes", "by hand, polars in two processes"
OURS = "penstock, read, preprocess and materialize"
MEMORY_ROWS = (250_000, 1_000_000, 4_000_000)
VERSIONS = ("numpy", "pyarrow", "ray")


def main() -> None:
    """Measure, and write `prepare.json`."""
    parser = options_parser(5)
    parser.add_argument("--format", choices=("parquet", "csv", "json", "one"), default="parquet")
    parser.add_argument("--peak", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak is not None:
        print(_peak_mb(options.peak))
        return
    result: dict[str, Any] = {"machine": describe(VERSIONS), "rounds": options.rounds}
    if options.format == "one":
        rows = ONE_FILE_ROWS
        sources = {"eight files": _written(options.data / "prepare-large", FILES, rows // FILES)}
        sources["one file"] = _joined(sources["eight files"])
        programs = {name: partial(_with_penstock, source, parallel=ray_map) for name, source in sources.items()}
    else:
        rows = FILES * FILE_ROWS // (1 if options.format == "parquet" else TEXT_PART)
        if options.format == "parquet":
            source = _written(options.data / "prepare", FILES, FILE_ROWS)
        else:
            source = _as_text(_written(options.data / "prepare-short", FILES, FILE_ROWS // TEXT_PART), options.format)
        programs = {BY_HAND: partial(_by_hand, _batches, source)}
        if options.format != "parquet" and find_spec("polars"):
            programs[POLARS] = partial(_by_hand, _polars_batches, source)
            result["machine"] = describe((*VERSIONS, "polars"))
        programs[OURS] = partial(_with_penstock, source, parallel=ray_map, format=options.format)
    variants = beside_the_first(_rounds(programs, rows, options.data, options.rounds), "rows_per_s")
    result |= {"format": options.format, "rows": rows, "variants": variants}
    if options.format == "parquet":
        peaks = {str(rows): _peak_of(_written(options.data / f"prepare-{rows}", 1, rows)) for rows in MEMORY_ROWS}
        save(options.out, "prepare", result | {"peak_mb": peaks})
        return
    save(options.out, f"prepare_{options.format}", result)


def _rounds(programs: Mapping[str, partial[None]], rows: int, scratch: Path, rounds: int) -> dict[str, list[float]]:
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    os.environ["POLARS_MAX_THREADS"] = "1"  # in each of the two processes
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:

        def measure(name: str) -> float:
            out, program = scratch / "prepare-out", programs[name]
            shutil.rmtree(out, ignore_errors=True)
            began = time.perf_counter()
            if program.func is _by_hand:
                program(out, pool)
            else:
                program(out)
            seconds = time.perf_counter() - began
            shutil.rmtree(out)
            return rows / seconds

        for name in programs:
            measure(name)  # all are warm, and the digests of the source files are remembered
        found = rows_per_s("prepare", programs, rounds, measure)
    ray.shutdown()
    return found


def _written(folder: Path, files: int, file_rows: int) -> Path:
    """The source, written on the first call."""
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for number in range(files):
            rng = np.random.default_rng([3, number])
            with pq.ParquetWriter(part / f"part-{number}.parquet", _table(rng, 0).schema) as writer:
                for start in range(0, file_rows, CHUNK):
                    writer.write_table(_table(rng, min(CHUNK, file_rows - start)))
        part.rename(folder)
    return folder


def _table(rng: np.random.Generator, rows: int) -> pa.Table:
    columns = {f"x{index}": rng.standard_normal(rows, np.float32) * 3 + 1 for index in range(COLUMNS)}
    return pa.table({**columns, "label": rng.integers(0, 2, rows)})


def _joined(source: Path) -> Path:
    """The same rows in one file."""
    folder = source.with_name(f"{source.name}-one")
    if not folder.exists():
        part = folder.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        files = sorted(source.iterdir())
        with pq.ParquetWriter(part / "all.parquet", pq.read_schema(files[0])) as writer:
            for file in files:
                for batch in pq.ParquetFile(file).iter_batches(CHUNK):
                    writer.write_batch(batch)
        part.rename(folder)
    return folder


Batches = Callable[[Path], Iterator[tuple[np.ndarray, np.ndarray]]]


def _by_hand(batches: Batches, source: Path, out: Path, pool: ProcessPoolExecutor) -> None:
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(source.iterdir())
    sums = [sum(part) for part in zip(*pool.map(partial(_sums, batches), files), strict=True)]
    count, total, squares = sums
    mean = total / count
    deviation = np.sqrt(squares / count - mean**2)
    list(pool.map(partial(_scale, batches, out, mean, deviation), files))


def _as_text(source: Path, format: str) -> Path:
    """The same rows as CSV or JSON lines."""
    folder = source.with_name(f"{source.name}-{format}")
    if not folder.exists():
        folder.mkdir()
        for file in sorted(source.glob("*.parquet")):
            frame = pq.read_table(file).to_pandas()
            target = folder / f"{file.stem}.{format}"
            if format == "csv":
                frame.to_csv(target, index=False)
            else:
                frame.to_json(target, orient="records", lines=True)
    return folder


def _read(file: Path) -> Iterator[pa.RecordBatch]:
    if file.suffix == ".parquet":
        return pq.ParquetFile(file).iter_batches(65536)  # type: ignore[no-any-return]
    if file.suffix == ".csv":
        reading = arrow_csv.ReadOptions(use_threads=False, block_size=4 << 20)
        return iter(arrow_csv.open_csv(file, read_options=reading))
    return iter(arrow_json.open_json(file, read_options=arrow_json.ReadOptions(use_threads=False, block_size=4 << 20)))


def _batches(file: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for batch in _read(file):
        yield np.stack([batch.column(index).to_numpy() for index in range(COLUMNS)], 1), batch.column(COLUMNS).to_numpy()


def _polars_batches(file: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    import polars

    frame = polars.read_csv(file) if file.suffix == ".csv" else polars.read_ndjson(file)
    yield frame[:, :COLUMNS].to_numpy(), frame["label"].to_numpy()


def _sums(batches: Batches, file: Path) -> tuple[Any, Any, Any]:
    count, total, squares = 0, np.zeros(COLUMNS), np.zeros(COLUMNS)
    for x, _ in batches(file):
        count += len(x)
        total += x.sum(0, np.float64)
        squares += np.square(x, dtype=np.float64).sum(0)
    return count, total, squares


def _scale(batches: Batches, out: Path, mean: np.ndarray, deviation: np.ndarray, file: Path) -> None:
    mean, deviation = mean.astype(np.float32), deviation.astype(np.float32)
    writer = None
    with pa.OSFile(str(out / f"{file.stem}.arrow"), "wb") as sink:
        for x, label in batches(file):
            batch = pa.record_batch({"features": tensor_array((x - mean) / deviation), "label": pa.array(label)})
            writer = writer or pa.ipc.new_file(sink, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()


def prepare_with_penstock(data: dict[str, Any], preprocess: list[dict[str, Any]], out: Path, parallel: ParallelMap) -> None:
    """What the stages read, preprocess and materialize do.

    Args:
        data, preprocess: sections of a pipeline file.
        out: storage for the prepared rows.
    """
    spec = PipelineSpec.model_validate(
        {
            "name": "prepare",
            "data": data,
            "preprocess": preprocess,
            "train": {"recipe": "model.py:Unused", "epochs": 1},
            "register": {"name": "prepare"},
        }
    )
    steps = list(spec.preprocess)
    files = list_source(spec.data, out.parent, format_of(spec.data).extensions).files
    snapshot = read_source(spec.data, files, silent, parallel=parallel if is_much(spec.data, files) else None, keep=True)
    fitted = fit_preprocess(spec.data, steps, snapshot, {}, silent, parallel=parallel)
    materialize(
        key="k",
        preparation=Preparation(spec.data, steps, fitted, snapshot, {}),
        spec=MaterializeSpec(),
        storage=Storage(str(out)),
        progress=silent,
        parallel=parallel,
    )
    forget_parsed(spec.data, snapshot.format, snapshot.files)


def _with_penstock(source: Path, out: Path, parallel: ParallelMap, format: str = "parquet") -> None:
    data = {"format": format, "train": str(source), "label": "label"}
    steps = [{"standard_scaler": {"columns": "*"}}, {"concatenator": {"columns": "*", "output": "features"}}]
    prepare_with_penstock(data, steps, out, parallel)


def _peak_of(source: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.prepare", "--peak", str(source)]
    peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    size = sum(file.stat().st_size for file in source.iterdir())
    print(f"prepare one file of {size / 1e6:,.0f} MB: peak {peak:,.0f} MB", file=sys.stderr, flush=True)
    return peak


def _peak_mb(source: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        _with_penstock(source, Path(folder, "out"), local_map)
    # Not ru_maxrss, which a child begins at its parent's.
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1e3


if __name__ == "__main__":
    main()
