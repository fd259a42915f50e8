"""Does the embedded Ray listen on this machine only, reach our packages, and leave nothing behind, even after SIGKILL?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import ray

from penstock.errors import ServiceError
from penstock.flows.servers.services import ray_cluster
from tests import ROOT
from tests.runs.forked import fork_workers_from_here

DRIVER = """
import contextlib, json, os, signal, sys, time
from pathlib import Path
import psutil
from penstock.flows.servers.services import ray_cluster

received = []

def terminate():
    # Seconds until this process is aborted, once our handler has had the signal: the handler of Ray's C++ core sets an alarm.
    before = len(received)
    os.kill(os.getpid(), signal.SIGTERM)
    while len(received) == before:  # another thread may be the one that is interrupted
        time.sleep(0.001)  # no event tells that the handler has run: it may run in this very thread
    return signal.getitimer(signal.ITIMER_REAL)[0]

def listening(process):
    try:
        return [c.laddr.ip for c in process.net_connections() if c.status == "LISTEN"]
    except psutil.NoSuchProcess:
        return []

def blocked(process):
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16) >> (signal.SIGTERM - 1) & 1

signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
with ray_cluster(Path(sys.argv[1]), min_cpus=len(os.sched_getaffinity(0)) + 0.5) as cluster:
    import ray

    @ray.remote(num_cpus=len(os.sched_getaffinity(0)) + 1)
    def look():
        import penstock.training
        names = "RAY_idle_worker_killing_time_threshold_ms", "PENSTOCK_CACHE_DIR", "RAY_AUTH_MODE", "RAY_ADDRESS"
        return *map(os.environ.get, names), penstock.training.__name__

    seen = ray.get(look.remote())
    family = psutil.Process().children(recursive=True)
    hosts = sorted({host for p in family for host in listening(p)})
    roots = [str(p) for p in Path(ray._private.worker._global_node.get_session_dir_path()).parents][:1]
    groups, daemons, deaf, idle = {}, {}, [], []
    for p in family:  # some of Ray's helpers live for an instant only
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, psutil.NoSuchProcess):
            idle += [word for word in p.cmdline() if word.endswith(("monitor.py", "dashboard.py"))]
            groups[p.name()] = os.getpgid(p.pid)
            daemons[p.name()] = p.pid
            deaf += [p.name()] if blocked(p) else []
    same_group = [name for name, group in groups.items() if group == os.getpgid(0)]
    print(json.dumps({"seen": seen, "hosts": hosts, "root": roots[0], "cpus": cluster.num_cpus, "address": cluster.address,
                      "pids": [p.pid for p in family], "daemons": daemons, "abort_in_s": terminate(),
                      "same_group": same_group, "deaf": deaf, "idle": idle}), flush=True)
    sys.stdin.readline()
print("over", "RAY_AUTH_TOKEN" in os.environ, terminate(), flush=True)
"""


def start_driver(state: Path) -> tuple[subprocess.Popen[str], dict[str, object]]:
    ours = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_CACHE_DIR": "near",
    }  # of where the driver is, not of where its workers are
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(state)],
        env=environment,
        cwd=state,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line, "the driver ended before its cluster was up"
    return driver, json.loads(line)


def wait_until_gone(pids: list[int], limit_s: float = 240) -> None:
    deadline = time.monotonic() + limit_s
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(alive, timeout=max(0.0, deadline - time.monotonic()))
    assert not alive, f"left behind: {alive}"


def test_embedded_cluster_is_local_and_leaves_nothing(tmp_path: Path) -> None:
    driver, facts = start_driver(tmp_path)
    assert facts["seen"] == ["30000", str(tmp_path / "near"), "token", facts["address"], "penstock.training"]
    assert {str(host).removeprefix("::ffff:") for host in facts["hosts"]} == {"127.0.0.1"}  # type: ignore[attr-defined]
    assert facts["cpus"] == len(os.sched_getaffinity(0)) + 1
    assert facts["abort_in_s"] == 0, "a checkpoint that takes longer to write would be lost"
    assert facts["same_group"] == [], "a SIGTERM to the driver's group would end Ray before the checkpoint"
    assert facts["idle"] == [], "Ray's monitors and dashboard have nothing to do here, and take a second of CPU to start"
    assert facts["deaf"] == [], "what is held back while Ray starts is held back in the driver only"
    assert Path(str(facts["root"])).is_dir() and len(str(facts["root"])) <= 40
    out, _ = driver.communicate("\n", timeout=300)
    assert driver.returncode == 0 and out.strip() == "over False 0.0"
    wait_until_gone(facts["pids"])  # type: ignore[arg-type]
    assert not Path(str(facts["root"])).exists()
    assert (tmp_path / "ray-cluster" / "logs").is_dir()


@pytest.mark.drill
def test_killed_driver_ends_cluster_and_killed_raylet_ends_driver(tmp_path: Path) -> None:
    driver, facts = start_driver(tmp_path)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until_gone(facts["pids"])  # type: ignore[arg-type]
    second, later = start_driver(tmp_path)
    assert not Path(str(facts["root"])).exists() and Path(str(later["root"])).is_dir()
    os.kill(later["daemons"]["raylet"], signal.SIGKILL)  # type: ignore[index]
    second.wait(timeout=60)
    _, told = second.communicate()
    assert second.returncode == ServiceError.exit_code
    assert f"its raylet (pid {later['daemons']['raylet']}) was killed by SIGKILL" in told  # type: ignore[index]
    assert f"Ray's logs are in {tmp_path / 'ray-cluster' / 'logs'}" in told
    assert list((tmp_path / "ray-cluster" / "logs").glob("raylet*"))
    wait_until_gone(later["pids"])  # type: ignore[arg-type]


@pytest.mark.parametrize("process", [pytest.param("gcs_server", marks=pytest.mark.drill), "raylet"])
def test_signal_during_ray_start_ends_all_processes(tmp_path: Path, process: str) -> None:
    script = """
import os, sys
from pathlib import Path
from penstock.flows.servers.services import ray_cluster
from penstock.errors import Interrupted
from penstock.machine.stopping import StopRequest, stopping_on_signals

try:
    with stopping_on_signals(StopRequest()), ray_cluster(Path(sys.argv[1])):
        print("it was too late", flush=True)
        sys.stdin.readline()
except Interrupted as error:
    import ray
    print(error.exit_code, ray.is_initialized(), flush=True)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    driver = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watched = psutil.Process(driver.pid)
    while not any(child.name() == process for child in children(watched)):
        assert driver.poll() is None
        time.sleep(0.01)  # a look takes CPU, which the start needs
    family = [child.pid for child in children(watched)]
    driver.send_signal(signal.SIGTERM)
    out, errors = driver.communicate(timeout=300)
    assert (driver.returncode, out.split()) == (0, ["143", "False"]), errors
    wait_until_gone(family)


def children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in process.children(recursive=True) if child.name()]
    except psutil.NoSuchProcess:
        return []


def test_uv_run_does_not_change_how_workers_start(tmp_path: Path) -> None:
    """Ray's hook looks at the names of parent processes. It refuses a file outside of the folder that it is about to pack."""
    (tmp_path / "run").write_text("import subprocess, sys; sys.exit(subprocess.call(sys.argv[2:]))")
    script = """
import subprocess, sys
from pathlib import Path
import ray
from penstock.flows.servers.ray_local import join_ray, local_ray

@ray.remote
def environment():
    return ray.get_runtime_context().runtime_env.get("working_dir"), sys.executable

code, state_dir, address = sys.argv[1:]
with join_ray(address) if address else local_ray(Path(state_dir), 1) as cluster:
    hook = ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV
    print(cluster.embedded, *ray.get(environment.remote()), hook, flush=True)
    if cluster.embedded:
        subprocess.run([sys.executable, "-c", code, code, state_dir, cluster.address], check=True)
"""
    command = [
        "uv",
        "run",
        "--with-requirements=/elsewhere/requirements.txt",
        sys.executable,
        "-c",
        script,
        script,
        str(tmp_path),
        "",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, executable=sys.executable, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    seen = ["None", sys.executable, "True"]  # the hook is there again afterwards, for a program's own Ray
    assert done.stdout.split() == ["True", *seen, "False", *seen], done.stderr


def test_absent_cluster_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ServiceError, match=r"RAY_ADDRESS=127\.0\.0\.1:9 does not answer"), ray_cluster(tmp_path):
        pass


def test_ray_of_the_program_is_used_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    fork_workers_from_here()
    ray.shutdown()  # of tests before
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=40)
    try:
        kept = ray.put("mine")
        with ray_cluster(tmp_path) as cluster:
            assert (cluster.num_cpus, cluster.embedded) == (2.0, True)
        assert ray.get(kept) == "mine"
    finally:
        ray.shutdown()
