"""Memory that was freed is used again without asking the system for it."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from tests import ROOT
from tests.ingest.preparing import Source

FAULTS = """
import resource, sys
import numpy as np
from penstock.ingest.malloc import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def pages_of_one_batch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    shard = [np.ones(7 << 20, np.uint8) for _ in range(4)]
    del shard
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

pages_of_one_batch()
print(sum(pages_of_one_batch() for _ in range(10)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives memory back so soon")
def test_a_batch_is_put_where_the_one_before_it_was() -> None:
    def faults(word: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, word], capture_output=True, text=True, check=True, cwd=ROOT)
        return int(done.stdout)

    assert faults("keep") < faults("as it is") / 2


def test_it_is_asked_for_where_rows_are_learnt_from_and_where_they_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for module in ("preprocess.tallies", "materialize.build"):
        monkeypatch.setattr(f"penstock.ingest.{module}.keep_freed_memory", partial(asked.append, module))
    files = {"train/a.parquet": pa.table({"x": [1.0, 2.0]})}
    Source.of(tmp_path, files, [{"standard_scaler": {"columns": ["x"]}}]).materialize()
    assert asked == ["preprocess.tallies", "materialize.build"]
