"""How does a test get several machines? Namespaces of this one: each has an address, a disk and processes of its own.

What a lost machine looks like to others cannot be tried with processes of one machine: a kernel that lives says goodbye to its
peers. Here a power cut ends the network first, and nothing gets out any more. Needs root, `ip` and `unshare` on Linux. The CPUs
are shared, so times to notice are real and rates of work are not. Everything that was made ends with `Machines.close`; the
machines also end with the process that made them, and the bridge that a killed one has left is taken away by the next.

    bridge pnb --- pn1 | eth0 10.77.7.11 in machine 1      each machine: namespaces of net, mount, pid, uts and ipc
               --- pn2 | eth0 10.77.7.12 in machine 2      /tmp, /dev/shm are its own, all else is this machine's
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from penstock.storage import Storage
from tests import ROOT
from tests.drills.project import Command, make_project
from tests.servers.swift import SwiftServer, die_with_parent
from tests.shared import CALM_EPOCHS, CALM_FILES

__all__ = ["HEAD", "WAIT_S", "Machines", "Project", "Site", "reason_not_here"]

_NET, _BRIDGE, _MOST = "10.77.7", "pnb", 9
_BOOT_S = 60
PATIENCE = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "11",
    "RAY_grpc_keepalive_timeout_ms": "60000",  # its 20 s are the length of the cut: a worker would be lost or not by chance
    # Else a task on a machine without power is given up after 300 s of silence and 120 s without an answer.
    "RAY_grpc_client_keepalive_time_ms": "20000",
    "RAY_grpc_client_keepalive_timeout_ms": "60000",
    "RAY_raylet_start_wait_time_s": "120",  # a busy machine needs more than Ray's 30
}
"""Ray calls a silent node dead after 65 s by default, here after some 30: more than a cut of 20 s, after which TCP needs
another 6 s to try again."""
HEAD = 1
"""The machine of Ray's head and of the command; it gives Ray no CPU."""
WAIT_S = 600
PAUSE_S = 1.2
"""A step of the recipe: what is cut off must not come to the end before it is replaced, nor the run before that is back."""

_INIT = """
set -e
stage=/dev/shm/penstock-machine
mount -t tmpfs shm /dev/shm
mkdir -p $stage/seen
mount --bind {seen} $stage/seen
mount --bind {disk} /tmp
mkdir -p {seen}
mount --bind $stage/seen {seen}
mount -o remount,bind,ro {seen}
mount -t proc proc /proc
hostname {name}
{hosts} > /dev/shm/hosts
cat /proc/sys/kernel/random/uuid > /dev/shm/boot_id
mount --bind /dev/shm/hosts /etc/hosts
mount --bind /dev/shm/boot_id /proc/sys/kernel/random/boot_id
echo ready
exec sleep infinity
"""


def reason_not_here() -> str | None:
    """Why there can be no machines on this one; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "several machines need root on Linux"
    if missing := [name for name in ("ip", "bridge", "unshare", "nsenter") if shutil.which(name) is None]:
        return f"several machines need {' and '.join(missing)} (iproute2, util-linux)"
    tried = subprocess.run(["unshare", "-m", "-n", "-p", "-u", "-i", "-f", "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else None


class Machines:
    """A network of machines, numbered from 1; number 0 is this machine, 10.77.7.1, on the same network.

    Args:
        folder: their disks, `disk1` and so on; not below a machine's /tmp as the machines see it.
        seen: a folder that all of them may read where it lies, although it is below /tmp: the code under test.
    """

    def __init__(self, folder: Path, seen: Path) -> None:
        self.folder, self._seen = folder, seen
        self._inits: dict[int, subprocess.Popen[bytes]] = {}
        self._pids: dict[int, int] = {}
        self._only_one = open(Path(tempfile.gettempdir(), "penstock-machines.lock"), "w")  # noqa: SIM115 - until `close`
        fcntl.flock(self._only_one, fcntl.LOCK_EX)
        subprocess.run(["ip", "link", "del", _BRIDGE], capture_output=True, check=False)
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "link", "set", _BRIDGE, "address", _mac(0), "up")
        _run("ip", "addr", "add", f"{_NET}.1/24", "dev", _BRIDGE)
        _know_neighbours(0, _BRIDGE)

    @staticmethod
    def address(number: int) -> str:
        """Its IP address."""
        return f"{_NET}.1{number}" if number else f"{_NET}.1"

    def boot(self, number: int) -> None:
        """Start a machine; its disk is as it was left."""
        disk = self.folder / f"disk{number}"
        disk.mkdir(parents=True, exist_ok=True)
        names = ["127.0.0.1 localhost", *(f"{self.address(each)} machine{each}" for each in range(1, _MOST + 1))]
        hosts = f"printf '%s\\n' {' '.join(map(shlex.quote, names))}"
        script = _INIT.format(seen=self._seen, disk=disk, name=f"machine{number}", hosts=hosts)
        init = subprocess.Popen(
            ["unshare", "-mpnui", "--fork", "--kill-child", "--propagation", "private", "bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self._inits[number] = init
        assert init.stdout is not None
        assert init.stdout.readline() == b"ready\n", f"machine {number} did not start"
        (pid,) = Path(f"/proc/{init.pid}/task/{init.pid}/children").read_text().split()
        self._pids[number] = int(pid)
        _run("ip", "link", "add", f"pn{number}", "type", "veth", "peer", "name", "eth0", "address", _mac(number), "netns", pid)
        _run("ip", "link", "set", f"pn{number}", "master", _BRIDGE, "up")
        inside = self.inside(number)
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        _run(*inside, "ip", "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        _know_neighbours(number, "eth0", *inside)

    def run(self, number: int, *command: str | Path, environment: Mapping[str, str], timeout_s: float = 300) -> str:
        """Run a command there to its end; it must succeed. Returns what it said."""
        done = subprocess.run(
            [*self.inside(number), *map(str, command)],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, (
            f"machine {number}: {shlex.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    def runs(self, number: int) -> bool:
        """Whether the machine has been started."""
        return number in self._pids

    def cut(self, number: int) -> None:
        """Drop all its traffic, in both directions; no connection gets a reset."""
        _run("bridge", "link", "set", "dev", f"pn{number}", "state", "0")

    def heal(self, number: int) -> None:
        """Let its traffic pass again."""
        _run("bridge", "link", "set", "dev", f"pn{number}", "state", "3")

    def part(self, one: int, other: int) -> None:
        """Drop the traffic between two machines; both still reach the others."""
        for me, peer in ((one, other), (other, one)):
            _run(*self.inside(me), *_neighbour(peer, "eth0", "02:77:07:00:00:ff"))  # nobody's

    def join(self, one: int, other: int) -> None:
        """Let the traffic between two machines pass again."""
        for me, peer in ((one, other), (other, one)):
            _run(*self.inside(me), *_neighbour(peer, "eth0", _mac(peer)))

    def power_off(self, number: int) -> None:
        """Nothing gets out any more, then SIGKILL of everything on it."""
        self.cut(number)
        os.kill(self._pids.pop(number), signal.SIGKILL)  # process 1: the kernel ends all others of its namespace
        self._inits.pop(number).wait(timeout=_BOOT_S)
        # The interface goes with the last process, which the kernel may take a moment to bury.
        deadline = time.monotonic() + _BOOT_S
        while Path(f"/sys/class/net/pn{number}").exists() and time.monotonic() < deadline:
            subprocess.run(["ip", "link", "del", f"pn{number}"], capture_output=True, check=False)
            time.sleep(0.05)  # the kernel tells nobody

    def close(self) -> None:
        """End and remove everything but the disks."""
        for number in list(self._pids):
            self.power_off(number)
        _run("ip", "link", "del", _BRIDGE)
        self._only_one.close()

    def inside(self, number: int) -> list[str]:
        """What to put before a command, so that it runs on that machine, in its /tmp."""
        return ["nsenter", "-t", str(self._pids[number]), "-m", "-p", "-n", "-u", "-i", "--", "env", "-C", "/tmp"]


def _know_neighbours(me: int, device: str, *inside: str) -> None:
    """A lost machine must be silence: the kernel that asks for its MAC would say "no route to host" after 3 s."""
    for number in range(_MOST + 1):
        if number != me:
            _run(*inside, *_neighbour(number, device, _mac(number)))


def _neighbour(number: int, device: str, mac: str) -> tuple[str, ...]:
    return ("ip", "neigh", "replace", Machines.address(number), "lladdr", mac, "nud", "permanent", "dev", device)


def _mac(number: int) -> str:
    return f"02:77:07:00:00:0{number}"


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr.strip()}"


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
