"""Does a run on several machines survive what happens to machines, tell it in time, and come to the same weights?

Ray calls a silent node dead after 65 s by default, here after some 30: more than a cut of 20 s, after which TCP needs
another 6 s to try again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fsspec.core import url_to_fs

from penstock.storage import Storage
from penstock.training.checkpoint.store import CheckpointStore
from tests import ROOT
from tests.drills.machines import Machines, reason_not_here
from tests.drills.project import DAY, Command, make_project
from tests.runs.servers import eventually
from tests.servers.swift import SwiftServer, UnavailableError, install_swift
from tests.shared import CALM_EPOCHS, CALM_FILES

pytestmark = [pytest.mark.drill, pytest.mark.s3, pytest.mark.timeout(1500)]

PATIENCE = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "11",
    "RAY_grpc_keepalive_timeout_ms": "60000",  # its 20 s are the length of the cut: a worker would be lost or not by chance
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine needs more than Ray's 30
}
SCORED_FILES = 100
HEAD = 1
"""The machine of Ray's head and of the command; it gives Ray no CPU."""
WAIT_S = 600
SPARE = bool(DAY % 2)
"""Whether a machine is free when one loses power."""
PAUSE_S = 1.2
"""A step of the recipe: what is cut off must not come to the end before it is replaced, nor the run before that is back."""


class Site:
    """Machines, an S3 server that all of them reach, and Ray on them."""

    def __init__(self, machines: Machines, server: SwiftServer) -> None:
        self.machines, self.server = machines, server
        self.address = f"{machines.address(HEAD)}:6379"
        self.environment = {
            **os.environ,
            **server.environment,
            **PATIENCE,
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
            "PREFECT_HOME": "/tmp/prefect",
            "PENSTOCK_CACHE_DIR": "/tmp/cache",
            "MPLCONFIGDIR": "/tmp/matplotlib",
            "PYTHONPATH": str(ROOT),
            "DRILL_PAUSE_S": str(PAUSE_S),
            "RAY_ADDRESS": self.address,
        }
        machines.boot(HEAD)
        self._ray(HEAD, "--head", "--port", "6379", "--include-dashboard", "false", "--num-cpus", "0")

    def worker(self, number: int, cpus: int = 1, without: str = "-") -> None:
        """Let a machine join, which is started if it is off. Its environment lacks names that begin with `without`."""
        if not self.machines.runs(number):
            self.machines.boot(number)
        environment = {name: value for name, value in self.environment.items() if not name.startswith(without)}
        self._ray(number, "--address", self.address, "--num-cpus", str(cpus), environment=environment)

    def _ray(self, number: int, *words: str, environment: Mapping[str, str] | None = None) -> None:
        start = (sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", self.machines.address(number))
        own = ("--disable-usage-stats", "--object-store-memory", "150000000", *words)
        given = {name: value for name, value in (environment or self.environment).items() if name != "RAY_ADDRESS"}
        self.machines.run(number, *start, *own, environment=given)

    def processes(self, number: int, title: str) -> list[str]:
        """Processes of that machine whose command line holds `title`."""
        listed = self.machines.run(number, "ps", "-eo", "args", environment=self.environment)
        return [line for line in listed.splitlines() if title in line]


class Project:
    """A project on the head's machine; its data and its storage are in the S3 server."""

    def __init__(self, site: Site, name: str) -> None:
        self.site, self.file = site, f"/tmp/{name}/pipeline.yaml"
        bucket = f"s3://{name}"
        fs, _ = url_to_fs(bucket)
        fs.mkdir(name)
        folder = site.machines.folder / f"disk{HEAD}" / name
        folder.mkdir(parents=True)
        file = make_project(folder, epochs=CALM_EPOCHS, files=CALM_FILES, workers=2)
        fs.put(f"{folder}/data/train/", f"{bucket}/data/train/", recursive=True)
        shutil.rmtree(folder / "data")
        text = file.read_text().replace("train: data/train/", f"train: {bucket}/data/train/")
        file.write_text(f"{text.replace('cpus_per_worker: 0.5', 'cpus_per_worker: 1')}storage: {bucket}/state\n")
        self.storage = Storage(f"{bucket}/state")

    def command(self, verb: str) -> Command:
        before = self.site.machines.inside(HEAD)
        return Command(verb, self.file, "--json", environment=self.site.environment, before=before)

    def checkpoints(self) -> dict[str, dict[str, Any]]:
        """Name -> manifest of all that lie there, whether they count or not."""
        found = {}
        for run in self.storage.list("runs"):
            for name in self.storage.list(f"runs/{run}/checkpoints"):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    found[name] = json.loads(self.storage.read_bytes(f"runs/{run}/checkpoints/{name}/manifest.json"))
        return found

    def step(self) -> int:
        """Of the newest checkpoint that has a manifest. It is looked at each second: few questions, the store is in Python."""
        folders = [f"runs/{run}/checkpoints" for run in self.storage.list("runs")]
        steps = {f"{folder}/{name}": int(name.split("-")[1]) for folder in folders for name in self.storage.list(folder)}
        newest_first = sorted(steps, key=steps.__getitem__, reverse=True)
        return next((steps[path] for path in newest_first if self.storage.exists(f"{path}/manifest.json")), 0)

    def places(self) -> list[int]:
        """Machine of each rank of the newest worker group."""
        (run,) = self.storage.list("runs")
        attempts = self.storage.list(f"runs/{run}/attempts")
        workers = self.storage.read_json(f"runs/{run}/attempts/{attempts[-1]}")["workers"]
        return [int(workers[str(rank)].split(":")[0].removeprefix("machine")) for rank in (0, 1)]


class Watched:
    """A run that is waited for, event by event; each tells the seconds since `mark`."""

    def __init__(self, project: Project) -> None:
        self.project, self.command = project, project.command("run")
        self.mark()

    def mark(self) -> float:
        """Count only later lines from now on."""
        self._said, self._since_s = len(self.command.said), time.monotonic()
        return self._since_s

    def until(self, what: str, seen: Callable[[], Any]) -> Any:
        self.command.wait_for(what, seen, timeout_s=WAIT_S, every_s=1)  # a look asks the store several times
        print(f"{time.monotonic() - self._since_s:6.1f} s  {what}", flush=True)

    def tells(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            return re.search(pattern, self.command.said[self._said :])

        self.until(pattern, found)
        match = found()
        assert match is not None
        return match

    def trains_on(self) -> None:
        begun = self.project.step()
        self.until(f"steps beyond {begun}", lambda: self.project.step() >= begun + 2)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    reason = reason_not_here()
    if reason is not None:
        pytest.skip(reason)
    try:
        programs = install_swift()
    except UnavailableError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("machines")
    with contextlib.ExitStack() as ends, pytest.MonkeyPatch.context() as patch:
        machines = Machines(folder, ROOT)
        ends.callback(machines.close)
        server = SwiftServer(folder / "swift", programs, machines.address(0))
        server.start()
        ends.callback(server.stop)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield Site(machines, server)


def test_network_and_power_cuts_are_reported_and_change_no_bit(site: Site, calm: dict[str, Any]) -> None:
    machines = site.machines
    site.worker(2)
    site.worker(3)
    project = Project(site, "faults")
    run = Watched(project)
    run.until("the first checkpoint", project.step)
    assert sorted(project.places()) == [2, 3]

    print("machine 3 is cut off for 20 s")
    began_s = run.mark()
    machines.cut(3)
    run.tells(r"train: no step for \d+ s; ")
    time.sleep(max(0.0, began_s + 20 - time.monotonic()))  # how long the cut lasts is what is tried
    machines.heal(3)
    run.trains_on()
    assert "a worker was lost" not in run.command.said

    print(f"machine 3 loses power, and there is {'a' if SPARE else 'no'} spare; PENSTOCK_DRILL_DAY={DAY + 1} is the other way")
    if SPARE:
        site.worker(5, cpus=2)
    run.mark()
    machines.power_off(3)
    # In whichever way it is reported first: Ray may find the loss before 15 s without a step have passed.
    run.tells(r"train: no step for \d+ s; |a worker was lost: rank \d on machine3 ")
    run.tells(r"a worker was lost: rank \d on machine3 \(pid \d+\).* \(restart 1 of 5\)")
    if not SPARE:
        run.tells(r"train: waiting for .*it lacks 1 more CPU: the cluster has 1, train.workers: 2 needs 2")
        site.worker(5, cpus=2)
    run.tells(r"train: continues from step \d+ \(bit-exact\)")
    first, second = project.places()
    assert {first, second} <= ({2, 5} if SPARE else {5})
    run.trains_on()

    print(f"machine {first} is cut off from the cluster for 90 s, and not from the storage: it trains on until replaced")
    site.worker(3)
    began_s = run.mark()
    machines.part(HEAD, first)
    continued = int(run.tells(r"train: continues from step (\d+) \(bit-exact\)")[1])
    assert first not in project.places()
    run.trains_on()
    logs = machines.folder / f"disk{first}" / "ray"
    refused = "this rank 0 (attempt 1, restart 1) was replaced by another (attempt 1, restart 2)"
    apart = "Connection closed by peer"  # where the other rank was elsewhere: it ended, and this one with it

    def has_ended() -> bool:
        said = [log.read_text() for log in logs.glob("session_2*/logs/worker-*.err")]
        return any(refused in text or apart in text for text in said) or not site.processes(first, "RayTrainWorker")

    # It may have to wait until Ray gives up the head, and the run may be over by then.
    eventually(has_ended, WAIT_S, "the refusal, or the end of the group that was cut off", every_s=1)
    time.sleep(max(0.0, began_s + 90 - time.monotonic()))  # how long the cut lasts is what is tried
    machines.join(HEAD, first)
    eventually(lambda: not site.processes(first, "RayTrainWorker"), WAIT_S, "the end of what was cut off", every_s=1)

    result = run.command.finish(timeout_s=WAIT_S)
    print(run.command.said)
    assert "\x1b" not in run.command.said and "(raylet)" not in run.command.said
    assert result["exactness"] == "bit-exact"
    assert result["weights_digest"] == calm["weights_digest"]
    (name,) = project.storage.list("runs")
    (dataset,) = project.storage.list("datasets")
    table = project.storage.read_json(f"datasets/{dataset}/manifest.json")["table"]
    by_node = {node: each["bytes"] for node, each in result["fetched_by_node"].items()}
    print(f"fetched: {by_node}")
    assert set(by_node) >= {"machine2", "machine5"}
    assert max(by_node.values()) <= sum(table["size_bytes"].values()), "no restart fetches a shard again"
    counted = {checkpoint.name for checkpoint in CheckpointStore(project.storage.child(f"runs/{name}")).committed()}
    late = {each for each, manifest in project.checkpoints().items() if manifest["writer"] == "a1-r1"}
    assert not {each for each in late & counted if int(each.split("-")[1]) > continued}


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
    assert all(site.processes(number, "ray::Worker") for number in (7, 8))
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
