"""Does a run on several machines survive what happens to machines, tell it in time, and come to the same weights?

Ray calls a silent node dead after a minute by default; here after some 9 s (`QUICK`), so a cut of 5 s stands for one of 20 s
with the defaults, and one of 20 s and more for one of 90 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fsspec.core import url_to_fs

from penstock.storage import Storage
from penstock.training.checkpoint.store import CheckpointStore
from tests import ROOT
from tests.drills.machines import Machines, reason_not_here
from tests.drills.project import Command, make_project
from tests.servers.swift import SwiftServer, UnavailableError, install_swift
from tests.shared import CALM_EPOCHS, CALM_FILES

pytestmark = [pytest.mark.drill, pytest.mark.s3, pytest.mark.timeout(1500)]

QUICK = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine needs more than Ray's 30
}
HEAD = 1
"""The machine of Ray's head and of the command; it gives Ray no CPU."""
WAIT_S = 600
PAUSE_S = 0.4
"""A step of the recipe, so that there is time for what happens."""


class Site:
    """Machines, an S3 server that all of them reach, and Ray on them."""

    def __init__(self, machines: Machines, server: SwiftServer) -> None:
        self.machines, self.server = machines, server
        self.address = f"{machines.address(HEAD)}:6379"
        self.environment = {
            **os.environ,
            **server.environment,
            **QUICK,
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
            "PREFECT_HOME": "/tmp/prefect",
            "PENSTOCK_CACHE_DIR": "/tmp/cache",
            "MPLCONFIGDIR": "/tmp/matplotlib",
            "PYTHONPATH": str(ROOT),
            "DRILL_PAUSE_S": str(PAUSE_S),
        }

    def head(self) -> None:
        self.machines.boot(HEAD)
        self._ray(HEAD, "--head", "--port", "6379", "--include-dashboard", "false", "--num-cpus", "0")

    def worker(self, number: int) -> None:
        """Boot a machine of one CPU, if it does not run, and let it join."""
        if not self.machines.runs(number):
            self.machines.boot(number)
        self._ray(number, "--address", self.address, "--num-cpus", "1")

    def _ray(self, number: int, *words: str) -> None:
        start = (sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", self.machines.address(number))
        own = ("--disable-usage-stats", "--object-store-memory", "150000000", *words)
        self.machines.run(number, *start, *own, environment=self.environment)

    def processes(self, number: int, title: str) -> list[str]:
        """Processes of that machine whose command line holds `title`."""
        listed = self.machines.run(number, "ps", "-eo", "args", environment=self.environment)
        return [line for line in listed.splitlines() if title in line]

    def run(self, name: str, *overrides: str) -> Run:
        return Run(self, name, *overrides)


class Run:
    """A `penstock run` on the head's machine; its data and its storage are in the S3 server."""

    def __init__(self, site: Site, name: str, *overrides: str) -> None:
        self.site = site
        bucket = f"s3://{name}"
        fs, _ = url_to_fs(bucket)
        fs.mkdir(name)
        folder = site.machines.folder / f"disk{HEAD}" / name
        folder.mkdir(parents=True)
        file = make_project(folder, epochs=CALM_EPOCHS, files=CALM_FILES)
        fs.put(f"{folder}/data/train/", f"{bucket}/data/train/", recursive=True)
        shutil.rmtree(folder / "data")
        text = file.read_text().replace("train: data/train/", f"train: {bucket}/data/train/")
        file.write_text(f"{text.replace('cpus_per_worker: 0.5', 'cpus_per_worker: 1')}storage: {bucket}/state\n")
        self.storage = Storage(f"{bucket}/state")
        self.command = Command(
            "run",
            f"/tmp/{name}/pipeline.yaml",
            "--json",
            *(word for override in overrides for word in ("--set", override)),
            environment={**site.environment, "RAY_ADDRESS": site.address},
            before=site.machines.inside(HEAD),
        )
        self.began_s = time.monotonic()

    def until(self, what: str, seen: Callable[[], Any], since_s: float | None = None) -> None:
        self.command.wait_for(what, seen, timeout_s=WAIT_S, every_s=0.2)
        print(f"{what} after {time.monotonic() - (since_s or self.began_s):.1f} s", flush=True)

    def told(self, pattern: str, since_s: float, after: str = "") -> None:
        """Wait for a line; `after` is what was said before."""
        self.until(pattern, lambda: re.search(pattern, self.command.said[len(after) :]), since_s)

    def trains_on(self, since_s: float, steps: int = 3) -> None:
        begun = self.step()
        self.until(f"{steps} steps beyond {begun}", lambda: self.step() >= begun + steps, since_s)

    def checkpoints(self) -> dict[str, dict[str, Any]]:
        """Name -> manifest of all that lie there, whether they count or not."""
        found = {}
        for run in self.storage.list("runs"):
            for name in self.storage.list(f"runs/{run}/checkpoints"):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    found[name] = json.loads(self.storage.read_bytes(f"runs/{run}/checkpoints/{name}/manifest.json"))
        return found

    def step(self) -> int:
        return max((manifest["step"] for manifest in self.checkpoints().values()), default=0)

    def places(self) -> dict[int, int]:
        """Rank -> machine, of the newest worker group."""
        (run,) = self.storage.list("runs")
        attempts = self.storage.list(f"runs/{run}/attempts")
        workers = self.storage.read_json(f"runs/{run}/attempts/{attempts[-1]}")["workers"]
        return {int(rank): int(place.split(":")[0].removeprefix("machine")) for rank, place in workers.items()}


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
        site = Site(machines, server)
        site.head()
        yield site


def test_cuts_and_power_cuts_are_told_in_time_and_change_no_bit(site: Site, calm: dict[str, Any]) -> None:
    machines = site.machines
    site.worker(2)
    site.worker(3)
    run = site.run("faults")
    run.until("the first checkpoint", run.step)
    assert sorted(run.places().values()) == [2, 3]

    since_s = time.monotonic()
    machines.cut(3)
    time.sleep(5)  # shorter than what Ray takes for a loss
    machines.heal(3)
    run.trains_on(since_s)
    assert "a worker was lost" not in run.command.said

    site.worker(4)
    said, since_s = run.command.said, time.monotonic()
    machines.power_off(3)
    run.told(r"a worker was lost: rank \d on machine3 \(10\.77\.7\.13\), .* \(restart 1 of 5\)", since_s, said)
    run.told(r"train: continues from step \d+ \(bit-exact\)", since_s, said)
    run.trains_on(since_s)
    assert sorted(run.places().values()) == [2, 4]

    said, since_s = run.command.said, time.monotonic()
    machines.power_off(4)
    run.told(r"train: waiting for 1 more CPU: the cluster has 1, train.workers: 2 needs 2", since_s, said)
    site.worker(3)
    run.told(r"train: continues from step \d+ \(bit-exact\)", since_s, said)
    run.trains_on(since_s)

    site.worker(4)
    first = run.places()[0]
    said, since_s = run.command.said, time.monotonic()
    machines.cut(first)
    run.told(r"\(restart 3 of 5\)", since_s, said)
    run.trains_on(since_s)
    machines.heal(first)
    run.until("the end of the replaced worker", lambda: not site.processes(first, "RayTrainWorker"), since_s)

    result = run.command.finish(timeout_s=WAIT_S)
    print(run.command.said)
    assert "\x1b" not in run.command.said and "(raylet)" not in run.command.said
    assert result["exactness"] == "bit-exact"
    assert result["weights_digest"] == calm["weights_digest"]


def test_a_rank_0_that_is_cut_off_from_the_cluster_and_not_from_the_storage_cannot_write(site: Site) -> None:
    machines = site.machines
    for number in (2, 3):
        if not machines.runs(number) or not site.processes(number, "raylet"):
            site.worker(number)
    run = site.run("fence", "train.workers=1")
    run.until("the first checkpoint", run.step)
    first = run.places()[0]
    since_s = time.monotonic()
    machines.part(HEAD, first)
    run.told(r"no step for \d+ s; machine\d \(.*\) does not answer|a worker was lost", since_s)
    run.told(r"train: continues from step \d+ \(bit-exact\)", since_s)
    (continued,) = re.findall(r"train: continues from step (\d+)", run.command.said)
    logs = machines.folder / f"disk{first}" / "ray" / "session_latest" / "logs"
    refused = "this rank 0 (attempt 1, restart 0) was replaced by another (attempt 1, restart 1)"
    run.until("the refusal in its log", lambda: any(refused in log.read_text() for log in logs.glob("worker-*.err")), since_s)
    machines.join(HEAD, first)
    run.until("its end", lambda: not site.processes(first, "RayTrainWorker"), since_s)
    result = run.command.finish(timeout_s=WAIT_S)
    print(run.command.said)

    assert result["exactness"] == "bit-exact"
    (name,) = run.storage.list("runs")
    counted = {checkpoint.name for checkpoint in CheckpointStore(run.storage.child(f"runs/{name}")).committed()}
    late = {each for each, manifest in run.checkpoints().items() if manifest["writer"] == "a1-r0"}
    assert not {each for each in late & counted if int(each.split("-")[1]) > int(continued)}
