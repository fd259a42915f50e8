"""Does scoring survive the loss of a machine, and is a machine named that cannot take part?"""

from __future__ import annotations

import shutil
from collections import Counter
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fsspec.core import url_to_fs

from penstock.storage import Storage
from tests.drills.machines import HEAD, WAIT_S, Project, Site
from tests.drills.project import Command

pytestmark = [pytest.mark.drill, pytest.mark.s3]

SCORED_FILES = 100


def test_scoring_survives_a_machine_without_power(site: Site, calm: dict[str, Any], calm_file: Path) -> None:
    machines, bucket, project = site.machines, Storage("s3://scores"), site.machines.folder / f"disk{HEAD}" / "calm"
    shutil.copytree(calm_file.parent, project)
    url_to_fs("s3://scores")[0].mkdir("scores")
    part = project / "data" / "train" / "part-0.parquet"
    files = [f"{number:03}.parquet" for number in range(SCORED_FILES)]
    for name in files:
        bucket.put_file(part, f"rows/{name}")
    for number in (7, 8):
        site.worker(number)
    words = (
        calm["model_uri"],
        "s3://scores/rows/",
        "--output",
        "s3://scores/out",
        "--file",
        "/tmp/calm/pipeline.yaml",
        "--json",
    )
    predict = Command("predict", *words, environment=site.environment, before=machines.inside(HEAD))
    units = partial(bucket.list, "out/_penstock/units")
    predict.wait_for("the first units", lambda: len(units()) > 3, WAIT_S, every_s=0.2)
    at_work = lambda: all(site.processes(number, "ray::call") for number in (7, 8))  # noqa: E731
    predict.wait_for("a worker on each machine", at_work, WAIT_S, every_s=0.2)  # the other may start later
    machines.power_off(8)
    assert len(units()) < SCORED_FILES
    said = predict.finish(timeout_s=WAIT_S)
    print(predict.said)
    assert (said["status"], said["files"], said["unscored"]) == ("done", SCORED_FILES, 0)
    outputs = [BytesIO(bucket.read_bytes(f"out/{name}")) for name in bucket.list("out") if name.endswith(".parquet")]
    scored = [file for output in outputs for file in pq.read_table(output)["file"].to_pylist()]
    assert Counter(scored) == dict.fromkeys(files, pq.read_metadata(part).num_rows)


def test_machine_without_keys_is_named(site: Site) -> None:
    site.worker(6, cpus=2, without="AWS_")
    command = Project(site, "keys").command("check")
    command.finish(3)
    found = [line.strip()[2:] for line in command.said.splitlines() if line.strip().startswith("- ")]
    assert "1 node of the Ray cluster 10.77.7.11:6379 cannot take part in this run" in command.said
    assert all(line.startswith("machine6 (10.77.7.16): ") for line in found)
    assert "needs credentials for bucket 'keys'" in found[0], command.said
    assert "AWS_SECRET_ACCESS_KEY in the environment of its `ray start`" in command.said
