"""What does a registered model spend on raw rows before it predicts: on one row, and beside materialize on a million?

    python -m benchmarks.raw_rows [--rounds 5] [--rows 1000000] [--out benchmarks/results]

The transforms of the tabular template: 30 numbers scaled and joined, and a label that is encoded. Materialize is the stage
itself, in one process: it reads Parquet, prepares, hashes, and writes shards. A model's rows come from the same files: it
reads them with pyarrow, compares columns and types with those it was trained on, and prepares them. Arrow has one thread.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from benchmarks.machine import describe
from benchmarks.outcome import beside_the_first, options_parser, rows_per_s, save
from penstock import load_spec
from penstock.flows.verbs.init import create_project
from penstock.ingest.files.listing import list_source
from penstock.ingest.formats.registry import format_of
from penstock.ingest.materialize.build import materialize
from penstock.ingest.preprocess.chain import Preparation
from penstock.ingest.preprocess.fit import fit_preprocess
from penstock.ingest.ray_tasks import local_map
from penstock.ingest.read.snapshot import read_source
from penstock.progress import silent
from penstock.storage import Storage
from penstock.training.registry.given_rows import given_rows, raw_table
from penstock.training.registry.raw_rows import RawRows, raw_form

MATERIALIZE, MODEL = "penstock, materialize", "penstock, a model's raw rows"
FILES, REQUESTS = 4, 2000


class Prepared:
    """The template's transforms, fitted on the rows of `source`, and both that apply them."""

    def __init__(self, project: Path, source: Path) -> None:
        spec = load_spec(project / "pipeline.yaml").spec
        # All rows are of one split, so that both prepare the same ones.
        data = spec.data.model_copy(update={"format": "parquet", "train": str(source), "validation": None, "test": None})
        steps, self.spec, self.source = list(spec.preprocess), spec, source
        snapshot = read_source(data, list_source(data, project, format_of(data).extensions).files, silent)
        fitted = fit_preprocess(data, steps, snapshot, {}, silent, parallel=local_map)
        self.preparation = Preparation(data, steps, fitted, snapshot, {})
        self.manifest = self.materialize(project.parent / "raw-rows-out")
        example = pq.read_table(sorted(source.iterdir())[0]).slice(0, 4)
        self.raw = RawRows(raw_form(data, fitted, {}, example), self.manifest.feed_schema)

    def materialize(self, out: Path) -> Any:
        """The stage, in this process."""
        shutil.rmtree(out, ignore_errors=True)
        made = materialize(
            key="k",
            preparation=self.preparation,
            spec=self.spec.materialize,
            storage=Storage(str(out)),
            progress=silent,
            parallel=local_map,
        )
        shutil.rmtree(out)
        return made

    def given(self, rows: Any) -> pa.Table:
        """Features of rows that a caller gives, as `LoadedModel` has them prepared before it predicts."""
        table, problems = raw_table(given_rows(rows), self.raw.schema, self.raw.form.unneeded)
        ready = self.raw.prepare(table)
        assert not problems and not ready.problems
        return ready.table


def main() -> None:
    """Measure, and write `raw_rows.json`."""
    parser = options_parser(5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    pa.set_cpu_count(1)
    project = options.data / "raw-rows" / "project"
    if not project.exists():
        create_project(project, "tabular")
    source = options.data / "raw-rows" / f"rows-{options.rows}"
    _write_rows(project, source, options.rows)
    prepared = Prepared(project, source)

    def measure(name: str) -> float:
        began = time.perf_counter()
        if name == MATERIALIZE:
            prepared.materialize(options.data / "raw-rows" / "out")
        else:
            count = sum(prepared.given(pq.read_table(file)).num_rows for file in sorted(source.iterdir()))
            assert count == options.rows
        return options.rows / (time.perf_counter() - began)

    for name in (MATERIALIZE, MODEL):
        measure(name)
    found = rows_per_s("raw rows", (MATERIALIZE, MODEL), options.rounds, measure)
    result = {
        "machine": describe(("numpy", "pyarrow", "pandas")),
        "rounds": options.rounds,
        "rows": options.rows,
        "requests": REQUESTS,
        "variants": beside_the_first(found, "rows_per_s"),
        "one_row_ms": _one_row(prepared, source),
    }
    save(options.out, "raw_rows", result)


def _write_rows(project: Path, folder: Path, count: int) -> None:
    """The template's rows again and again with some noise, in Parquet."""
    if folder.exists():
        return
    table = arrow_csv.read_csv(project / "data" / "breast_cancer.csv")
    names = [name for name in table.column_names if name != "diagnosis"]
    values, random = np.stack([table[name].to_numpy() for name in names], axis=1), np.random.default_rng(5)
    folder.mkdir(parents=True)
    for number in range(FILES):
        chosen = random.integers(0, len(values), count // FILES)
        taken = values[chosen] * random.normal(1, 0.01, (len(chosen), values.shape[1]))
        columns = {name: taken[:, index] for index, name in enumerate(names)}
        label = table["diagnosis"].take(pa.array(chosen))
        pq.write_table(pa.table({**columns, "diagnosis": label}), folder / f"part-{number}.parquet")


def _one_row(prepared: Prepared, source: Path) -> dict[str, dict[str, float]]:
    """Milliseconds of one row, by how it is given."""
    rows = pq.read_table(sorted(source.iterdir())[0]).slice(0, 64).combine_chunks()
    single = [rows.slice(row, 1) for row in range(rows.num_rows)]
    forms = {
        "a dict": [one.to_pylist() for one in single],
        "an Arrow table": single,
        "a DataFrame": [one.to_pandas() for one in single],
    }
    found = {}
    for name, given in forms.items():
        times = []
        for number in range(REQUESTS):
            began = time.perf_counter()
            prepared.given(given[number % len(given)])
            times.append((time.perf_counter() - began) * 1e3)
        found[name] = {"median": statistics.median(times), "p99": statistics.quantiles(times, n=100)[98]}
        print(f"one row as {name}: {found[name]['median']:.3f} ms", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
