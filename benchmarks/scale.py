"""Does anything grow with shards, ranks, objects or runs? By simulation: 10^6 shards of 10^6 rows, 1,024 ranks.

    python -m benchmarks.scale [--out benchmarks/results]

Contents are faked: all shards are one file, and a store lists objects that it makes up. All else is penstock's own code: the
table of shards, the order, the feed, `plan`, `run`, `status` and `log`. Each measurement is a process of its own, so that its
peak of memory is its own, and stands beside the same one on a hundredth.

`epoch` reads a whole epoch of a rank from a store, whose shards are of 16 rows each and differ in eight bytes. `reused` runs
all stages up to the order again, of as many source files in a store as there are shards: the records of the run before are
made up. `columns` prepares 200 rows of CSV with so many columns. `wide` and `heavy` are whole runs by the command, `read` to
`register`, on Parquet: rows of so many columns with 1,000 classes, and rows of so many megabytes.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations

from benchmarks.machine import describe
from benchmarks.outcome import options_parser, save
from penstock.digest import bytes_digest, file_digest
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.feed.cached import CachedFeed, open_cached_feed
from penstock.ingest.files.listing import list_location
from penstock.ingest.manifest import DatasetManifest, ShardInfo, ShardTable
from penstock.ingest.materialize.shard_file import with_provenance, write_shard
from penstock.ingest.schema import ColumnInfo, FeedSchema
from penstock.ingest.shuffle.lanes import lanes_of
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.progress import silent
from penstock.storage import Storage

SHARDS, ROWS = (10**4, 10**6), 10**6
"""Shards, and the rows of each."""

RANKS, BATCH = 1024, 256
"""Ranks, and the rows of one in a step."""

SMALL_ROWS = 16
"""Rows of a shard whose whole epochs are read."""

RUNS = (20, 2000)
"""Runs on record."""

COLUMNS = (1000, 20_000)
"""Columns of the widest rows."""

WIDE = (500, 5_000)
"""Columns of rows with 1,000 classes."""

HEAVY = (7, 70)
"""Megabytes of the heaviest rows."""

WINDOWED = {"mode": "windowed", "window_rows": 64 * ROWS}
ORDERS: dict[str, dict[str, Any]] = {
    "global": {},
    "windowed by rows": WINDOWED,
    "windowed by shards": {**WINDOWED, "window_of": "shards"},
}
SCHEMA = FeedSchema(columns=(ColumnInfo(name="x", dtype="float32"),))


class FakedShards(Storage):
    """A local storage whose shards are all one file."""

    def local_path(self, path: str = "") -> Path:
        return super().local_path("shard.arrow" if path.startswith("units/") else path)


def make_dataset(folder: Path, shards: int) -> DatasetManifest:
    """Write one shard, and the manifest of so many of them, four to a unit."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "shard.arrow"
    values = np.arange(ROWS, dtype=np.float32)
    write_shard(file, [with_provenance(pa.table({"x": tensor_array(values)}), np.zeros(ROWS), np.arange(ROWS))])
    return _manifest(folder, f"of-{shards}", file.stat().st_size, ROWS, [file_digest(file)] * shards)


def make_small(folder: Path, shards: int) -> DatasetManifest:
    """Write the manifest of so many shards that differ, and what they are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    write_shard(folder / "small.arrow", [with_provenance(pa.table({"x": tensor_array(_MARK)}), *([np.arange(SMALL_ROWS)] * 2))])
    shard = _SmallShard(folder)
    return _manifest(
        folder, f"small-{shards}", len(shard.of(0)), SMALL_ROWS, [bytes_digest(shard.of(n)) for n in range(shards)]
    )


_MARK = np.arange(SMALL_ROWS, dtype=np.float32) + 0.7
"""Values of the small shard, by which they are found in its file."""


class _SmallShard:
    """Makes the bytes of shard `number`: its first two values are the number."""

    def __init__(self, folder: Path) -> None:
        self._bytes = (folder / "small.arrow").read_bytes()
        self._at = self._bytes.index(_MARK.tobytes())

    def of(self, number: int) -> bytes:
        return self._bytes[: self._at] + number.to_bytes(8, "little") + self._bytes[self._at + 8 :]


def _manifest(folder: Path, key: str, size: int, rows: int, digests: list[str]) -> DatasetManifest:
    table = ShardTable.of(
        [
            ShardInfo(
                path=f"units/{number // 4:032x}/train-{number % 4:05d}.arrow",
                split="train",
                rows=rows,
                size_bytes=size,
                digest=digest,
                unit=f"{number // 4:032x}",
            )
            for number, digest in enumerate(digests)
        ]
    )
    manifest = DatasetManifest(
        key=key,
        feed_schema=SCHEMA,
        rows={"train": len(digests) * rows},
        table=table,
        units=len(digests) // 4,
        content_digest="scale",
        split_digests=dict.fromkeys(("train", "validation", "test"), "scale"),
    )
    manifest.write(Storage(str(folder)))
    return manifest


def feed_case(folder: Path, shards: int, name: str) -> dict[str, Any]:
    """Open the feed of the last rank, and read batches; in a process of its own."""
    base = _peak_mb()
    storage = FakedShards(str(folder))
    began = time.process_time()
    manifest = DatasetManifest.model_validate(storage.read_json(f"datasets/of-{shards}/manifest.json")).opened(storage)
    spec = ShuffleSpec.model_validate(ORDERS[name])
    order = make_order(spec, shards * ROWS, manifest.shards_of("train").rows, RANKS * BATCH)
    rank = RANKS - 1
    feed = open_cached_feed([(storage, manifest)], "train", order=order, batch_rows=RANKS * BATCH, rank=rank, world_size=RANKS)
    opened, open_mb = time.process_time() - began, _peak_mb()
    ids = min(_ids_ms(feed) for _ in range(5))
    own = order.lane_rows.shards_of(*lanes_of(rank, RANKS, order.lanes))
    return {
        "open_cpu_s": opened,
        "imports_mb": base,
        "open_mb": open_mb,
        "peak_mb": _peak_mb(),
        "batch_ids_ms": ids,
        "lanes": order.lanes,
        "fetches_an_epoch": len(own),
    }


def epoch_case(folder: Path, shards: int, name: str) -> dict[str, Any]:
    """Read two epochs of the last rank from a store, whose shards stay on the node; in a process of its own."""
    _use_store()
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["PENSTOCK_CACHE_DIR"] = str(cache)
    storage = Storage(f"scale://{folder}")
    manifest = DatasetManifest.model_validate(storage.read_json(f"datasets/small-{shards}/manifest.json")).opened(storage)
    spec = ShuffleSpec.model_validate({**ORDERS[name], "window_rows": 64 * SMALL_ROWS * RANKS})
    order = make_order(spec, shards * SMALL_ROWS, manifest.shards_of("train").rows, RANKS)
    feed = open_cached_feed([(storage, manifest)], "train", order=order, batch_rows=RANKS, rank=RANKS - 1, world_size=RANKS)
    found: dict[str, Any] = {"open_requests": FakedStore.requests}
    for epoch in range(2):
        before, began, rows = FakedStore.requests, time.process_time(), 0
        for batch in feed.batches(epoch):
            rows += batch.rows
        found |= {
            f"epoch_{epoch}_requests": FakedStore.requests - before,
            "rows": rows,
            f"epoch_{epoch}_cpu_s": time.process_time() - began,
        }
    own = order.lane_rows.shards_of(*lanes_of(RANKS - 1, RANKS, order.lanes))
    shutil.rmtree(cache)
    first = found["open_requests"] + found["epoch_0_requests"]
    return {**found, "first_requests": first, "own_shards": len(own), "peak_mb": _peak_mb()}


class FakedStore(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store of records in a local folder, which makes up units and objects. Counts requests: a listing has 1,000 names."""

    protocol = "scale"
    cachable = False
    requests, units, shard_bytes = 0, 0, 0
    source: Path | None = None
    """The content of every object."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = LocalFileSystem()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("scale://").rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a path."""
        return f"scale://{name}"

    def _asked(self, names: int = 1) -> None:
        FakedStore.requests += -(-names // 1000) or 1

    def _unit(self, folder: str) -> Iterator[dict[str, Any]]:
        for name in ("unit.json", *(f"train-{number:05d}.arrow" for number in range(4))):
            yield {"name": f"{folder}/{name}", "size": self.shard_bytes, "type": "file"}

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        """List a folder, or the files of a made-up unit."""
        self._asked()
        path = self._strip_protocol(path)
        if "/units/" in path:
            return [info if detail else info["name"] for info in self._unit(path)]
        return self._local.ls(path, detail=detail)

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **options: Any) -> Any:
        """List all files of made-up units, or the objects of a folder `objects-<number>`, with what S3 says of each."""
        path = self._strip_protocol(path)
        if path.endswith("/units"):
            units = (self._unit(f"{path}/{unit:032x}") for unit in range(self.units))
            found = {info["name"]: info for unit in units for info in unit}
        elif "/objects-" not in path:
            self._asked()
            return self._local.find(path, maxdepth, withdirs, detail, **options)
        else:
            objects = (self._object(path, number) for number in range(int(path.rpartition("-")[2])))
            found = {info["name"]: info for info in objects}
        self._asked(len(found))
        return found if detail else sorted(found)

    @staticmethod
    def _object(folder: str, number: int) -> dict[str, Any]:
        name = f"{folder}/{number // 1000:04d}/part-{number:07d}.parquet"
        size = FakedStore.source.stat().st_size if FakedStore.source is not None else 1 << 20
        facts = {"ETag": f'"{number:032x}"', "LastModified": dt.datetime(2026, 11, 28, tzinfo=dt.UTC), "Size": size}
        return {"Key": name, **facts, "StorageClass": "STANDARD", "size": size, "type": "file", "name": name}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return facts of a file."""
        self._asked()
        path = self._strip_protocol(path)
        if "/objects-" in path:
            return self._object(path.rsplit("/", 2)[0], int(path[-15:-8]))
        found: dict[str, Any] = self._local.info(path)
        return found

    def isfile(self, path: str) -> bool:
        """Tell whether a path is a file."""
        return path.endswith(".parquet") or ("/objects-" not in path and bool(super().isfile(path)))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Read a file."""
        self._asked()
        content: bytes = self._local.cat_file(self._place(path), start, end)
        return content

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._asked()
        return open(self._place(path), mode)

    def _place(self, path: str) -> str:
        return str(self.source) if "/objects-" in path else self._strip_protocol(path)

    def get_file(self, rpath: str, lpath: str, **options: Any) -> None:
        """Fetch a small shard, which is made up."""
        self._asked()
        root, _, name = self._strip_protocol(rpath).rpartition("/units/")
        unit, _, shard = name.partition("/train-")
        Path(lpath).write_bytes(_small(root).of(4 * int(unit, 16) + int(shard.removesuffix(".arrow"))))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Write a file."""
        self._asked()
        path = self._strip_protocol(path)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "xb" if mode == "create" else "wb") as file:
            file.write(value)

    def rm_file(self, path: str) -> None:
        """Delete a file."""
        self._asked()
        Path(self._strip_protocol(path)).unlink()

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Delete a file or a folder."""
        self._asked()
        self._local.rm(self._strip_protocol(path), recursive=recursive)


@functools.cache
def _small(root: str) -> _SmallShard:
    return _SmallShard(Path(root))


def _use_store() -> None:
    fsspec.register_implementation("scale", FakedStore)
    known_implementations["scale"] = {"class": "benchmarks.scale.FakedStore"}  # for the check of names


def listing_case(folder: Path, objects: int, _variant: str) -> dict[str, Any]:
    """List the objects of a source; in a process of its own."""
    _use_store()
    base, began = _peak_mb(), time.process_time()
    found = list_location("parquet", (".parquet",), folder, f"scale://bucket/objects-{objects}")
    assert len(found.files) == objects
    took = time.process_time() - began
    return {"cpu_s": took, "imports_mb": base, "peak_mb": _peak_mb(), "requests": FakedStore.requests}


def plan_case(folder: Path, shards: int, _variant: str) -> dict[str, Any]:
    """Plan a run whose rows are so many shards in a store: its checks are those of a run that reuses them."""
    return _recorded(folder, shards, "planned", files=1)


def reused_case(folder: Path, shards: int, _variant: str) -> dict[str, Any]:
    """Run such a run again, of as many source files."""
    return _recorded(folder, shards, "rerun", files=shards)


def _recorded(folder: Path, shards: int, case: str, files: int) -> dict[str, Any]:
    """Make up the records of a run of so many source files and shards, and measure `case` on it."""
    from penstock.flows.spec_file import load_spec
    from penstock.flows.verbs.init import create_project
    from penstock.ingest.preprocess.fit import fit_preprocess
    from penstock.ingest.ray_tasks import local_map
    from penstock.ingest.read.snapshot import read_source
    from penstock.tasks.records.keys import stage_keys
    from penstock.tasks.records.ledger import Ledger, StageRecord, utc_now
    from penstock.tasks.shuffle import train_order

    _use_store()
    own = folder / f"project-{case}-{shards}"
    shutil.rmtree(own, ignore_errors=True)
    create_project(own, "tabular")
    state, settings = own / "state", ["train.workers=1", f"storage=scale://{own / 'state'}", "train.batch_rows=1024"]
    (state / "units").mkdir(parents=True, exist_ok=True)
    project = load_spec(own / "pipeline.yaml", settings).project
    snapshot = read_source(project.spec.data, list(project.files), silent)
    fitted = fit_preprocess(project.spec.data, project.spec.preprocess, snapshot, {}, silent, parallel=local_map)
    if files > 1:
        FakedStore.source = own / "source.parquet"
        pq.write_table(pa.csv.read_csv(own / "data" / "breast_cancer.csv"), FakedStore.source)
        settings += ["data.format=parquet", f"data.train=scale://bucket/objects-{files}"]
        project = load_spec(own / "pipeline.yaml", settings).project
        found = tuple(file.with_facts(rows=ROWS) for file in project.files)
        snapshot = snapshot.model_copy(update={"format": "parquet", "files": found})
    made = DatasetManifest.model_validate(Storage(str(folder)).read_json(f"datasets/of-{shards}/manifest.json"))
    made = made.opened(Storage(str(folder)))
    order = train_order(project.spec.shuffle, made, project.spec.train.batch_rows)
    outputs: dict[Any, dict[str, Any]] = {
        "read": snapshot.model_dump(mode="json"),
        "preprocess": fitted.model_dump(mode="json"),
        "materialize": made.model_dump(mode="json"),
        "shuffle": {"order": order.model_dump(mode="json"), "fingerprint": order.fingerprint},
    }
    made.write(Storage(str(state)))
    ledger = Ledger(Storage(str(state)))
    for stage, output in outputs.items():
        key = stage_keys(project, ledger.stage_output)[stage]
        record = StageRecord(stage=stage, key=key.key, inputs=key.inputs, output=output, seconds=0, made=utc_now())
        ledger.save_stage(f"stages/{stage}/{key.key}.json", record)
    return _apart(case, shards, json.dumps([str(own / "pipeline.yaml"), settings, made.shards[0].size_bytes]))


def planned_case(_folder: Path, shards: int, variant: str) -> dict[str, Any]:
    """Plan what `plan_case` has made; in a process of its own."""
    from penstock.flows.spec_file import load_spec
    from penstock.flows.verbs.plan import plan_pipeline

    _use_store()
    file, settings, FakedStore.shard_bytes = json.loads(variant)
    FakedStore.units = shards // 4
    base, began = _peak_mb(), time.process_time()
    planned = plan_pipeline(load_spec(Path(file), settings))
    took, actions = time.process_time() - began, [stage["action"] for stage in planned["stages"]]
    assert actions[:4] == ["reuse"] * 4, planned["stages"]
    return {"cpu_s": took, "imports_mb": base, "peak_mb": _peak_mb(), "requests": FakedStore.requests}


def rerun_case(_folder: Path, shards: int, variant: str) -> dict[str, Any]:
    """Run what `reused_case` has made twice, and measure the second, in processes of their own: the first begins the run."""
    file, settings, size = json.loads(variant)
    code = f"from benchmarks.scale import rerun; rerun({shards}, {file!r}, {settings!r}, {size})"
    for _ in range(2):
        before = _children_s()
        done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "with_children_cpu_s": _children_s() - before}


def rerun(shards: int, file: str, settings: list[str], size: int) -> None:
    """Run a pipeline up to its order by the command, in this process."""
    from penstock.flows.cli import main as command

    _use_store()
    FakedStore.units, FakedStore.shard_bytes, FakedStore.source = shards // 4, size, Path(file).parent / "source.parquet"
    sys.argv = ["penstock", "run", file, "--until", "shuffle", *(part for setting in settings for part in ("--set", setting))]
    began = time.process_time()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            command()
    except SystemExit as end:
        assert not end.code, f"the run ended with {end.code}"
    took = time.process_time() - began
    print(json.dumps({"cpu_s": took, "peak_mb": _peak_mb(), "requests": FakedStore.requests}))


def columns_case(folder: Path, columns: int, _variant: str) -> dict[str, Any]:
    """Prepare 200 rows of CSV with so many columns in this process: read, fit a scaler of all of them, and materialize."""
    from penstock.flows.spec_file import load_spec
    from penstock.ingest.materialize.build import materialize
    from penstock.ingest.preprocess.chain import Preparation
    from penstock.ingest.preprocess.fit import fit_preprocess
    from penstock.ingest.ray_tasks import local_map
    from penstock.ingest.read.snapshot import read_source

    own = folder / f"columns-{columns}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir(parents=True)
    values = np.random.default_rng(0).standard_normal((200, columns)).astype(np.float32)
    table = pa.table({**{f"c{number}": column for number, column in enumerate(values.T)}, "y": np.arange(200) % 2})
    pyarrow.csv.write_csv(table, own / "rows.csv")
    (own / "model.py").write_text("class Net: ...\n")
    (own / "pipeline.yaml").write_text(
        "name: columns\ndata: {format: csv, train: rows.csv, validation: {fraction: 0.2}, label: y}\n"
        "preprocess: [standard_scaler: {columns: '*'}, label_encoder]\ntrain: {recipe: model.py:Net}\n"
    )
    began = time.process_time()
    project = load_spec(own / "pipeline.yaml").project
    spec = project.spec
    snapshot = read_source(spec.data, list(project.files), silent)
    fitted = fit_preprocess(spec.data, spec.preprocess, snapshot, {}, silent, parallel=local_map)
    preparation = Preparation(spec.data, spec.preprocess, fitted, snapshot, {})
    storage = Storage(str(own / "state"))
    made = materialize(
        key="rows", preparation=preparation, spec=spec.materialize, storage=storage, progress=silent, parallel=local_map
    )
    assert len(made.feed_schema.columns) == columns + 1
    return {"cpu_s": time.process_time() - began, "peak_mb": _peak_mb()}


_NET = """
import torch
class Net:
    def build_model(self, schema):
        return torch.nn.Linear({inputs}, schema.num_classes)
    def predict(self, model, batch):
        return model(batch["x"].view(len(batch["x"]), {inputs}, -1).mean(2))
    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(self.predict(model, batch), batch["y"])
"""


def wide_case(folder: Path, columns: int, _variant: str) -> dict[str, Any]:
    """Run 20,000 rows of so many columns and 1,000 classes to a registered model."""
    random, names = np.random.default_rng(0), [f"c{number}" for number in range(columns)]
    values = (dict(zip(names, random.standard_normal((columns, 5000), np.float32), strict=True)) for _ in range(4))
    tables = (pa.table({**part, "y": random.permutation(5000) % 1000}) for part in values)
    steps = "[standard_scaler: {columns: '*'}, concatenator: {columns: '*', output: x}, label_encoder]"
    return _whole_run(folder / f"wide-{columns}", tables, steps, inputs=columns, batch_rows=256)


def heavy_case(folder: Path, megabytes: int, variant: str) -> dict[str, Any]:
    """Run 12 rows of so many megabytes to a registered model, a row a step; `variant` rows lie in a file."""
    random, rows, width = np.random.default_rng(0), int(variant), megabytes * 250_000
    flat = (pa.array(random.standard_normal(rows * width, np.float32)) for _ in range(12 // rows))
    tables = (pa.table({"x": pa.FixedSizeListArray.from_arrays(part, width), "y": np.arange(rows) % 2}) for part in flat)
    return _whole_run(folder / f"heavy-{megabytes}", tables, "[]", inputs=50, batch_rows=1)


def _whole_run(own: Path, tables: Iterator[pa.Table], steps: str, *, inputs: int, batch_rows: int) -> dict[str, Any]:
    """Run a pipeline by the command: seconds of its stages, and the most private memory of its processes by their names."""
    shutil.rmtree(own, ignore_errors=True)
    (own / "rows").mkdir(parents=True)
    for number, table in enumerate(tables):
        pq.write_table(table, own / "rows" / f"{number}.parquet")
    (own / "model.py").write_text(_NET.format(inputs=inputs))
    (own / "pipeline.yaml").write_text(
        "name: rows\ndata:\n  format: parquet\n  train: rows/\n  label: y\n  validation: {fraction: 0.1, by: row}\n"
        f"  test: {{fraction: 0.1, by: row}}\npreprocess: {steps}\n"
        f"train: {{recipe: model.py:Net, batch_rows: {batch_rows}, epochs: 2, workers: 1}}\n"
    )
    began, peaks = time.monotonic(), dict[str, float]()
    command = [sys.executable, "-m", "penstock", "run", "pipeline.yaml", "--json"]
    with subprocess.Popen(command, cwd=own, stdout=subprocess.PIPE, text=True) as run:
        while run.poll() is None:
            for process in [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]:
                with contextlib.suppress(psutil.Error, OSError, StopIteration, IndexError):  # it has ended
                    name = "the command" if process.pid == run.pid else process.cmdline()[0]
                    peaks[name] = max(peaks.get(name, 0.0), _status_mb(process.pid, "RssAnon"))
            time.sleep(0.2)
        assert not run.returncode and run.stdout is not None, f"the run ended with {run.returncode}"
        stages = {stage["name"]: stage["seconds"] for stage in json.loads(run.stdout.read())["stages"]}
    named = {name: mb for name, mb in peaks.items() if name == "the command" or name.startswith("ray::")}
    return {"seconds": time.monotonic() - began, "stages_s": stages, "peak_mb": named}


def ledger_case(folder: Path, runs: int, _variant: str) -> dict[str, Any]:
    """Time commands on a ledger of so many runs, each with an attempt, as CPU seconds with those of their imports."""
    from penstock.flows.spec_file import load_spec
    from penstock.flows.verbs.init import create_project
    from penstock.tasks.records.keys import stage_keys
    from penstock.tasks.records.ledger import Ledger

    project = folder / f"ledger-{runs}"
    if not project.exists():
        create_project(project, "tabular")
    loaded = load_spec(project / "pipeline.yaml")
    ledger = Ledger(loaded.project.storage)
    spec, keys = loaded.spec.model_dump(mode="json", by_alias=True), stage_keys(loaded.project, ledger.stage_output)
    run = None
    for _ in range(runs - len(ledger.storage.list("runs"))):
        run = ledger.new_run(loaded.spec.name, spec, run).model_copy(update={"status": "done", "keys": keys})
        ledger.save_run(run)
        attempt = ledger.new_attempt(run.run)
        ledger.save_attempt(run.run, attempt.model_copy(update={"status": "done", "ended": attempt.started}))
    if run is not None:
        ledger.make_current(run)
    found = {}
    for verb in (["status"], ["log"], ["plan", str(project / "pipeline.yaml")]):
        before = _children_s()
        command = [sys.executable, "-m", "penstock", *verb]
        subprocess.run(command, check=True, cwd=project, stdout=subprocess.DEVNULL)
        found[f"{verb[0]}_cpu_s"] = _children_s() - before
    return found


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _ids_ms(feed: CachedFeed) -> float:
    """Milliseconds that the ids of a batch of this rank take, over the batches that are computed at once."""
    at_once = 16
    positions = [feed._own_positions(first, first + feed.part.batch_rows) for first in _starts(feed, at_once)]
    began = time.process_time()
    feed._ids_at(0, np.concatenate(positions))
    return (time.process_time() - began) / at_once * 1e3


def _starts(feed: CachedFeed, count: int) -> Iterator[int]:
    middle = feed.num_rows // feed.part.batch_rows // 2
    return ((middle + number) * feed.part.batch_rows for number in range(count))


def _peak_mb() -> float:
    """Peak of this process's own memory and of the files that it maps; `ru_maxrss` would begin with that of the parent."""
    return _status_mb("self", "VmHWM")


def _status_mb(process: int | str, field: str) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1]) / 1e3


CASES = {
    "feed": feed_case,
    "epoch": epoch_case,
    "listing": listing_case,
    "plan": plan_case,
    "planned": planned_case,
    "reused": reused_case,
    "rerun": rerun_case,
    "ledger": ledger_case,
    "columns": columns_case,
    "wide": wide_case,
    "heavy": heavy_case,
}


def main() -> None:
    """Measure, and write `scale.json`."""
    parser = options_parser(1)
    parser.add_argument("--case", nargs=3, help="one measurement, in this process: name, size, variant")
    options = parser.parse_args()
    folder = options.data / "scale"
    if options.case:
        name, size, variant = options.case
        print(json.dumps(CASES[name](folder, int(size), variant)))
        return
    found: dict[str, Any] = {}
    for shards in SHARDS:
        make_dataset(folder, shards)
        for name in ORDERS:
            found.setdefault("feed", {}).setdefault(name, {})[str(shards)] = _apart("feed", shards, name)
        make_small(folder, shards)
        for name in ("global", "windowed by shards"):
            found.setdefault("epoch", {}).setdefault(name, {})[str(shards)] = _apart("epoch", shards, name)
        for case in ("plan", "listing", "reused"):
            found.setdefault(case, {})[str(shards)] = _apart(case, shards, "-")
    for runs in RUNS:
        found.setdefault("ledger", {})[str(runs)] = _apart("ledger", runs, "-")
    for columns in COLUMNS:
        found.setdefault("columns", {})[str(columns)] = _apart("columns", columns, "-")
    for columns in WIDE:
        found.setdefault("wide", {})[str(columns)] = _apart("wide", columns, "-")
    for megabytes in HEAVY:
        found.setdefault("heavy", {})[str(megabytes)] = _apart("heavy", megabytes, "4")
    save(options.out, "scale", {"machine": describe(("numpy", "pyarrow", "torch")), **found})


def _apart(case: str, size: int, variant: str) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--case", case, str(size), variant]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{case} {size:,} {variant}: {result}", file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    main()
