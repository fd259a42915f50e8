"""Two machines with a disk each: what is not shared is refused before anything is spent, and what is shared trains.

The second machine is a Ray node in a mount namespace of its own, with another disk over some folders of the project.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import pytest

from tests.drills.project import Command, make_project  # not forked: Ray reads its settings when it is imported
from tests.runs.servers import eventually, free_port
from tests.shared import CALM_EPOCHS, CALM_FILES

# `ray start` refuses a second node on 127.0.0.1.
JOIN = """\
import os, signal, socket
from ray._private.node import Node
from ray._private.parameter import RayParams

socket.sethostname("node2")
Node(
    RayParams(
        gcs_address=os.environ["HEAD"],
        node_ip_address="127.0.0.1",
        num_cpus=int(os.environ["CPUS"]),
        object_store_memory=200_000_000,
        min_worker_port=0,
        max_worker_port=0,
    ),
    head=False,
)
print("Ray runtime started", flush=True)
signal.pause()
"""
OTHER_DISK = 'for folder in "$@"; do mount -t tmpfs -o size=64m none "$folder" || exit; done; exec "$PYTHON" -c "$JOIN"'


def cannot_be_two_machines() -> str:
    if os.geteuid() != 0:
        return "needs root, for mount namespaces"
    tried = subprocess.run(["unshare", "-m", "-u", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.drill,
    pytest.mark.usefixtures("shared_prefect"),
    pytest.mark.skipif(bool(cannot_be_two_machines()), reason=cannot_be_two_machines()),
]


def end(process: subprocess.Popen[bytes]) -> None:
    """End a machine: its first process and all of its family, at once."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    process.wait()


class Join(Protocol):
    """Starts another machine, with other disks at the folders, and waits until it is in the cluster."""

    def __call__(self, own: Sequence[Path], cpus: int = 1) -> subprocess.Popen[bytes]: ...


@contextlib.contextmanager
def cluster(log: Path) -> Iterator[tuple[dict[str, str], Join]]:
    """A cluster of this machine with a CPU; (what names it in an environment, how others join)."""
    port = free_port()
    settings = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray puts the machine's address in place of 127.0.0.1
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    ray = str(Path(sys.executable).parent / "ray")
    head = [ray, "start", "--head", "--port", str(port), "--node-ip-address", "127.0.0.1", "--include-dashboard", "false"]
    head += ["--num-cpus", "1", "--object-store-memory", "200000000", "--block"]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, log.open("wb") as output:  # sockets' paths are short
        environment = {**os.environ, **settings, "RAY_TMPDIR": folder, "HEAD": f"127.0.0.1:{port}"}
        environment |= {"PYTHON": sys.executable, "JOIN": JOIN}
        started: list[subprocess.Popen[bytes]] = []

        def start(command: Sequence[str], cpus: int = 1) -> subprocess.Popen[bytes]:
            given = {**environment, "CPUS": str(cpus)}
            started.append(subprocess.Popen(command, env=given, stdout=output, stderr=output))
            eventually(lambda: log.read_bytes().count(b"Ray runtime started") == len(started), 180, " ".join(command))
            return started[-1]

        def joined(own: Sequence[Path], cpus: int = 1) -> subprocess.Popen[bytes]:
            return start(["unshare", "-m", "-u", "sh", "-c", OTHER_DISK, "sh", *map(str, own)], cpus)

        try:
            start(head)
            yield {**settings, "RAY_ADDRESS": f"127.0.0.1:{port}"}, joined
        finally:
            for process in started:
                if process.returncode is None:
                    end(process)


def refusal(command: Command) -> tuple[list[str], str]:
    """What was said by a command that refused with exit code 3: the findings about nodes, and the next step."""
    command.finish(3)
    lines = [line.strip() for line in command.said.splitlines()]
    return [line[2:] for line in lines if line.startswith("- ")], next(line for line in lines if line.startswith("Next:"))


class Machines(NamedTuple):
    """A project, and the cluster that it is to run on."""

    file: Path
    """The second machine has folders `.penstock` and `rows` of its own beside it."""
    environment: dict[str, str]
    second: subprocess.Popen[bytes]
    """What the second machine began with."""
    join: Join


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    file = make_project(folder / "project", epochs=CALM_EPOCHS, files=CALM_FILES, workers=2)
    shutil.copytree(file.parent / "data" / "train", file.parent / "rows")
    (file.parent / ".penstock").mkdir()
    with cluster(folder / "ray.log") as (environment, join):
        yield Machines(file, environment, join([file.parent / ".penstock", file.parent / "rows"]), join)


def test_node_without_storage_and_rows_is_refused_before_work(machines: Machines) -> None:
    file, state = machines.file, machines.file.parent / ".penstock"
    words = ["run", str(file), "--set", "data.train=rows/", "--json"]
    found, advice = refusal(Command(*words, environment=machines.environment))
    unseen = [f"storage {state}, which is a folder of the machine this command runs on"]
    unseen += [f"{part}, which this command reads" for part in sorted((file.parent / "rows").iterdir())]
    assert found == [f"node2 (127.0.0.1): does not see {what}" for what in unseen]
    assert "set `storage` to s3:// or to a folder that every node mounts" in advice and "put the data into s3://" in advice
    spent = [path for name in ("units", "datasets", "stages", "runs") for path in state.glob(f"{name}/*")]
    assert spent == []


def test_shared_folder_trains_the_weights_of_an_embedded_run(machines: Machines, tmp_path: Path, calm: dict[str, Any]) -> None:
    # A worker on each of them.
    words = [str(machines.file), "--set", f"storage={tmp_path / 'shared'}", "--set", "train.cpus_per_worker=1", "--json"]
    trained = Command("run", *words, environment=machines.environment).finish(timeout_s=800)
    assert trained["weights_digest"] == calm["weights_digest"]
    assert trained["exactness"] == "bit-exact"


def test_silent_node_is_named_and_waited_for(machines: Machines, tmp_path: Path) -> None:
    raylets = [process for process in psutil.process_iter(["name"]) if process.info["name"] == "raylet"]
    (silent,) = [raylet for raylet in raylets if machines.second.pid in {parent.pid for parent in raylet.parents()}]
    silent.suspend()
    try:
        words = ["check", str(machines.file), "--set", f"storage={tmp_path / 'shared'}", "--json"]
        command = Command(*words, environment=machines.environment)
        command.wait_for("its name", lambda: "waiting for node2 (127.0.0.1) to start a process" in command.said)
    finally:
        silent.resume()
    command.finish()


def test_late_node_without_storage_is_named(machines: Machines, tmp_path: Path) -> None:
    end(machines.second)
    storage = tmp_path / "storage"
    storage.mkdir()
    asked = machines.join([], cpus=2)
    # It takes the one worker, for it alone has two CPUs.
    words = [str(machines.file), "--set", f"storage={storage}", "--set", "train.workers=1", "--set", "train.cpus_per_worker=2"]
    running = Command("run", *words, "--set", "train.params={pause_s: 0.1}", "--json", environment=machines.environment)
    running.wait_for("a checkpoint", lambda: any(storage.glob("runs/*/checkpoints/*/manifest.json")))
    end(asked)
    machines.join([storage], cpus=2)
    running.finish(3)
    assert "node2, a node that joined the Ray cluster after its nodes were checked, does not see" in running.said
    assert f"{storage}/runs/" in running.said
