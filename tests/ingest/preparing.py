"""A source in a folder, its steps and its code, prepared in one call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.ingest.formats.section import spec_class_for
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.build import materialize
from penstock.ingest.materialize.overlap import Begin
from penstock.ingest.materialize.shard_file import open_shard
from penstock.ingest.preprocess.chain import Chain, Preparation
from penstock.ingest.preprocess.fit import fit_preprocess
from penstock.ingest.preprocess.problems import Origin, raise_for
from penstock.ingest.preprocess.transform_spec import FittedPreprocess, TransformSpec
from penstock.ingest.ray_tasks import ParallelMap, local_map
from penstock.ingest.read.inspection import PART_BYTES
from penstock.ingest.read.snapshot import SourceSnapshot, read_source
from penstock.ingest.read.strata import with_strata
from penstock.ingest.schema import Split
from penstock.ingest.spec import DataSpec, MaterializeSpec
from penstock.progress import silent
from penstock.storage import Storage
from penstock.usercode.capture import UserCode, capture
from tests import ROOT
from tests.ingest.reading import listed, write_files
from tests.runs.servers import eventually

__all__ = ["HOLDS", "ONE_FILE_PER_UNIT", "Source", "apply_chain", "counting_code", "killed_in", "transform_table"]

ONE_FILE_PER_UNIT = MaterializeSpec(unit_bytes=1)


@dataclass
class Source:
    """A pipeline's data part below one folder."""

    folder: Path
    data: DataSpec
    steps: list[TransformSpec]
    ships_params: bool = False
    """Whether files that params name travel with the code. The log of `counting_code` does not: it is written, not read."""

    @classmethod
    def of(cls, folder: Path, files: Mapping[str, Any] | None = None, steps: Sequence[Any] = (), **data: Any) -> Source:
        """Write `files` and parse `steps` and `data` as a pipeline file would give them."""
        write_files(folder, files or {})
        section = {"format": "parquet", "train": "train", **data}
        spec = spec_class_for(section).model_validate(section)
        return cls(folder, spec, [TransformSpec.model_validate(step) for step in steps])

    @property
    def code(self) -> dict[str, UserCode]:
        steps = [(step.transform.function, step.transform.options) for step in self.steps]
        return {
            target: capture(target, self.folder, options.model_dump() if self.ships_params else None)
            for target, options in steps
            if target is not None
        }

    def snapshot(self) -> SourceSnapshot:
        return with_strata(self.data, read_source(self.data, listed(self.data, self.folder), silent))

    def fit(self, parallel: ParallelMap = local_map) -> FittedPreprocess:
        return fit_preprocess(self.data, self.steps, self.snapshot(), self.code, silent, parallel=parallel)

    def preparation(self, fitted: FittedPreprocess | None = None) -> Preparation:
        return Preparation(self.data, tuple(self.steps), fitted or self.fit(), self.snapshot(), self.code)

    def materialize(
        self,
        storage: Storage | None = None,
        spec: MaterializeSpec = ONE_FILE_PER_UNIT,
        parallel: ParallelMap = local_map,
        fitted: FittedPreprocess | None = None,
        piece_bytes: int = PART_BYTES,
        begin: Begin | None = None,
    ) -> DatasetManifest:
        """Prepare everything into `storage` (default: `state` in the folder)."""
        return materialize(
            key="key",
            preparation=self.preparation(fitted),
            spec=spec,
            storage=storage or self.storage,
            progress=silent,
            parallel=parallel,
            piece_bytes=piece_bytes,
            begin=begin,
        )

    @property
    def storage(self) -> Storage:
        return Storage(str(self.folder / "state"))

    def column(self, manifest: DatasetManifest, name: str, split: Split = "train") -> np.ndarray:
        """A whole column of the dataset in `state`, in row order."""
        shards = [open_shard(self.storage.local_path(shard.path)) for shard in manifest.shards_of(split)]
        return np.concatenate([shard.column(name) for shard in shards])


def counting_code(folder: Path, body: str = "pass") -> str:
    """Write a map_batches function that appends a line to the file `calls` for each call; return its target."""
    (folder / "count.py").write_text(
        f"import os, time\n\ndef count(batch, log):\n    with open(log, 'a') as calls:\n"
        f"        calls.write(f'{{int(batch[\"x\"][0])}}\\n')\n    {body}\n    return batch\n"
    )
    return "count.py:count"


HOLDS = "time.sleep(3600 * (os.environ.get('HELD_IN') == str(len(open(log).readlines()))))"
"""Body for `counting_code`: the call that `killed_in` names is at work until the kill."""


def killed_in(call: int, make: str, folder: Path, committed: int) -> int:
    """Materialize in a process that is killed in that call of the function; returns how many units are on record then.

    Args:
        call: its number, from 1, among the calls of all processes.
        make: a module's function, as `tests.module:function`, that makes the source in `folder`, with `HOLDS` in its code.
        committed: how many units are on record, or are brought to disk, when the call begins.
    """
    module, _, name = make.partition(":")
    program = f"from pathlib import Path; from {module} import {name}; {name}(Path({str(folder)!r})).materialize()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HELD_IN": str(call)}
    log = folder / "calls"
    records = lambda: len([*folder.glob("state/units/*/unit.json")])  # noqa: E731
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment) as child:
        try:
            begun = lambda: log.exists() and len(log.read_text().split()) == call  # noqa: E731
            eventually(lambda: begun() or child.poll() is not None, 60, f"call {call}", every_s=0.02)
            eventually(lambda: records() >= committed, 60, f"{committed} units are on record", every_s=0.02)
        finally:
            child.kill()
    assert child.returncode == -signal.SIGKILL
    return records()


def transform_table(table: pa.Table, steps: Sequence[Any] = (), **data: Any) -> pa.Table:
    """Prepare a table with steps that learn nothing."""
    spec = DataSpec.model_validate({"format": "parquet", "train": "train", **data})
    parsed = [TransformSpec.model_validate(step) for step in steps]
    fitted = FittedPreprocess.model_validate({"steps": [{"step": step} for step in parsed]})
    return apply_chain(Chain(spec, parsed, fitted, {}), table)


def apply_chain(chain: Chain, table: pa.Table, file: str = "part-0.parquet", first_row: int = 100) -> pa.Table:
    """Prepare rows of one file, and raise for those that cannot be used under `data.invalid: error`."""
    rows = chain.prepare(table, Origin.of_file(file, first_row, table.num_rows))
    if chain._data.invalid == "error":
        raise_for(rows.problems, label=chain._data.label)
    return rows.table
