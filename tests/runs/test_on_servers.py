"""The same pipeline against servers: S3, a Ray cluster of two nodes, MLflow over HTTP, Prefect; a kill -9, and the weights of a
run that is embedded."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import mlflow
import psutil
import pytest
from mlflow.tracking import MlflowClient

from penstock.ingest.feed.node_cache import NodeCache
from penstock.ingest.manifest import DatasetManifest, manifest_path
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger
from tests.drills.project import Command, make_project
from tests.runs.servers import free_port, script_environment, serving
from tests.servers.swift import store_client
from tests.shared import CALM_EPOCHS, CALM_FILES

pytestmark = pytest.mark.drill


NOTES_WHERE_IT_RUNS = """\
    def __init__(self, pause_s: float = 0.0, where: str = ""):
        self.pause_s, self.where, self.next_answer = pause_s, where, itertools.count(1).__next__

    def predict(self, model, batch):
        with open(self.where + ".pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
        return self.scores(model, batch)

    def scores(self, model, batch):
"""


class Servers(NamedTuple):
    """What an operator gave to the user: variables of the environment."""

    environment: dict[str, str]
    state: Path
    """Where the servers keep what they are sent."""


RAY = """
import os, sys
from ray.cluster_utils import Cluster

os.mkdir(os.environ["RAY_TMPDIR"] + "/ray")  # the cluster writes its address there, and does not look whether it can
node = {"num_cpus": 1, "object_store_memory": 200_000_000, "node_ip_address": "127.0.0.1"}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextlib.contextmanager
def ray_of_two_nodes(environment: dict[str, str], log: Path) -> Iterator[str]:
    """The address of a cluster of two nodes with a CPU each, which listens on 127.0.0.1 only and asks for the token."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, log.open("wb") as output:  # sockets' paths are short
        own = {**environment, "RAY_TMPDIR": folder}
        holder = subprocess.Popen(
            [sys.executable, "-c", RAY], env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
        )
        try:
            assert holder.stdout is not None
            address = holder.stdout.readline().strip()
            assert address, log.read_text(errors="replace")[-3000:]
            yield address
        finally:
            family = psutil.Process(holder.pid).children(recursive=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                holder.communicate(timeout=60)
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            holder.kill()


def listening_elsewhere(address: str) -> list[str]:
    """What the processes of the cluster at `address` listen on besides 127.0.0.1."""
    port = int(address.rpartition(":")[2])
    listens = [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.pid]
    (head,) = [c.pid for c in listens if c.laddr.port == port]
    family = {process.pid for process in psutil.Process(head).parent().children(recursive=True)}  # type: ignore[union-attr]
    return [str(c.laddr) for c in listens if c.pid in family and c.laddr.ip.removeprefix("::ffff:") != "127.0.0.1"]


@pytest.fixture
def servers(tmp_path: Path, s3_bucket: str, rows_bucket: tuple[str, dict[str, str]], prefect_url: str) -> Iterator[Servers]:
    assert s3_bucket and rows_bucket  # the nodes of the cluster have the keys of both stores in their own environment
    state = tmp_path / "servers"
    state.mkdir()
    port = free_port()
    tracking = f"http://127.0.0.1:{port}"
    own = {**script_environment(state), "MLFLOW_PORT": str(port)}
    ray_settings = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Ray puts the machine's address in place of 127.0.0.1, for nodes and for drivers, unless it takes it for a laptop.
    ray_settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    with (
        serving("mlflow.sh", environment=own, log=state / "mlflow.log", url=f"{tracking}/health"),
        ray_of_two_nodes({**os.environ, **ray_settings}, state / "ray.log") as ray_address,
    ):
        named = {"PREFECT_API_URL": prefect_url, "RAY_ADDRESS": ray_address, "MLFLOW_TRACKING_URI": tracking}
        yield Servers({**named, **ray_settings}, state)


def checkpoints_in(storage: Storage) -> Callable[[], bool]:
    return lambda: any(
        storage.exists(f"runs/{run}/checkpoints/{name}/manifest.json")
        for run in storage.list("runs")
        for name in storage.list(f"runs/{run}/checkpoints")
    )


def damage_a_shard(storage: Storage) -> None:
    """Change a byte of prepared rows in the store, and let this machine forget its copy of them."""
    (dataset,) = storage.list("datasets")
    shard = DatasetManifest.model_validate(storage.read_json(manifest_path(dataset))).opened(storage).shards[0]
    content = bytearray(storage.read_bytes(shard.path))
    content[len(content) // 2] ^= 1
    storage.write_bytes(shard.path, bytes(content))
    for copy in NodeCache().folder.glob(f"*/{shard.digest}.arrow"):
        copy.unlink()


def outcomes(result: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["outcome"] for stage in result["stages"]}


def test_killed_between_servers_it_continues_to_the_weights_of_an_embedded_run(
    tmp_path: Path,
    calm: dict[str, Any],
    s3_bucket: str,
    rows_bucket: tuple[str, dict[str, str]],
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = make_project(tmp_path / "remote", epochs=CALM_EPOCHS, files=CALM_FILES, workers=2)
    rows = file.parent / "data" / "train"
    bucket, settings = rows_bucket  # the rows lie in a store of their own, with other credentials
    for part in sorted(rows.iterdir()):
        store_client(settings).upload_file(str(part), bucket.removeprefix("s3://"), f"rows/train/{part.name}")
    for part in rows.iterdir():
        part.unlink()
    model = file.parent / "model.py"
    model.write_text(model.read_text().replace("    def predict(self, model, batch):\n", NOTES_WHERE_IT_RUNS))
    text = file.read_text().replace("train: data/train/", f"train: {bucket}/rows/train/")
    text += f"storage: {s3_bucket}/state\nstores: {{{bucket}: {json.dumps(settings)}}}\n"
    file.write_text(f"{text}evaluate: {{slices: [label]}}\n")
    where, pids = tmp_path / "ran", tmp_path / "ran.pids"
    words = [str(file), "--json", "--set", f"train.params={{pause_s: 0.1, where: {where}}}"]
    storage = Storage(f"{s3_bucket}/state")

    check = Command("check", *words, environment=servers.environment)
    assert check.finish()["status"] == "done"
    assert pids.read_text(), "the first batch is tried"
    command = Command("run", *words, environment=servers.environment)
    command.wait_for("a checkpoint", checkpoints_in(storage), timeout_s=900, every_s=2)
    command.kill()
    damage_a_shard(storage)

    again = Command("run", *words, environment=servers.environment)
    continued = again.finish(timeout_s=900)
    assert "has another content than its manifest's digest" in again.said and "its rows are prepared again" in again.said
    assert outcomes(continued) == {
        **dict.fromkeys(("read", "preprocess", "shuffle"), "reused"),
        "materialize": "ran",
        "train": "resumed",
        **dict.fromkeys(("evaluate", "register"), "ran"),
    }
    assert continued["attempt"] == 2
    (fetched,) = continued["fetched_by_node"].values()
    assert fetched["bytes"] > 0, "the shards that are prepared again come from the store"
    assert continued["exactness"] == "bit-exact"
    assert continued["weights_digest"] == calm["weights_digest"]
    assert continued["metrics"] == calm["metrics"]
    ran = [int(pid) for pid in pids.read_text().split()]
    assert not {check.process.pid, command.process.pid} & set(ran), "check and train run the model on the cluster"
    assert ran.count(again.process.pid) == 2, "so does evaluate; register lets the model answer for one example and some rows"
    page = f"{servers.environment['MLFLOW_TRACKING_URI']}/#/experiments/"
    assert continued["url"].startswith(page) and f"/runs/{continued['mlflow_run_id']}?" in continued["url"]
    assert not (file.parent / ".penstock").exists(), "everything is in the store and on the servers"
    assert listening_elsewhere(servers.environment["RAY_ADDRESS"]) == []

    # Prefect's server has both attempts, MLflow's one run with every step once, its checkpoints, and a model that answers.
    url = servers.environment["PREFECT_API_URL"]
    attempts = Ledger(storage).attempts(continued["run"])
    flow_runs = [httpx.get(f"{url}/flow_runs/{attempt.prefect_flow_run_id}").json() for attempt in attempts]
    assert [flow_run["state"]["type"] for flow_run in flow_runs] == ["CRASHED", "COMPLETED"]
    client = MlflowClient(servers.environment["MLFLOW_TRACKING_URI"])
    run = client.get_run(continued["mlflow_run_id"])
    assert run.info.status == "FINISHED"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "train/loss")]
    assert steps == sorted(set(steps)) and steps[-1] == 115
    assert 115 in {model.step for model in run.outputs.model_outputs}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", servers.environment["MLFLOW_TRACKING_URI"])
    slices = [*csv.DictReader(io.StringIO(mlflow.artifacts.load_text(f"runs:/{run.info.run_id}/evaluation/slices.csv")))]
    assert sorted(row["slice"] for row in slices) == [f"label={digit}" for digit in range(10)]
    right = sum(int(row["rows"]) * float(row["accuracy"]) for row in slices) / sum(int(row["rows"]) for row in slices)
    assert right == pytest.approx(continued["metrics"]["val/accuracy"], abs=1e-5)
    answers = Ledger(storage).answers(continued["run"], "validation")
    assert answers is not None and answers["file"][0].as_py().startswith("train/")
    model = mlflow.pyfunc.load_model(continued["model_uri"])
    assert len(model.predict(model.input_example)) > 0

    again = Command("run", *words, environment=servers.environment).finish()
    assert set(outcomes(again).values()) == {"reused"}
    assert again["model_uri"] == continued["model_uri"]
    listed = Command("status", str(file), "--json", environment=servers.environment).finish()
    assert [(run["run"], run["status"], run["step"]) for run in listed["runs"]] == [(continued["run"], "done", 115)]

    for secret in (os.environ["AWS_SECRET_ACCESS_KEY"], servers.environment["RAY_AUTH_TOKEN"]):
        written = [path for path in servers.state.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
        assert not written
