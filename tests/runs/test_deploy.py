"""Does a deployed pipeline run, reuse everything, stop when Prefect cancels it, and continue? Real server, worker and training.

The servers come from the scripts in `deployments/servers/`; the tests follow the order of a deployment's life. penstock is the
installed wheel, and the project holds modules named like parts of it, on the path of every process: `PYTHONPATH=.`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import psutil
import pytest
from mlflow.tracking import MlflowClient
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import PrefectHTTPStatusError
from prefect.states import Cancelling, Failed

from penstock.errors import ServiceError
from penstock.flows.deploy.deploy import Plan, deploy_pipeline
from penstock.storage import Storage
from penstock.tasks.records.ledger import Ledger
from penstock.training.checkpoint.store import CheckpointStore
from tests.drills.project import make_project
from tests.runs.receivers import SECRET, Mailbox, Webhook
from tests.runs.servers import ROOT, eventually, free_port, script_environment, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NEW_YEAR = "0 0 1 1 *"
"""A schedule that does not come due while the tests run."""
RUN_S = 300
CANARY = "canary-of-the-operator"
STEPS_PER_EPOCH = 23
"""1,442 of the 1,797 digits are for training, in batches of 64."""
STAGES = ["read", "preprocess", "materialize", "shuffle", "train", "evaluate", "register"]


class Operator(NamedTuple):
    """A user with a Prefect server, a project and a shell."""

    url: str
    file: Path
    environment: dict[str, str]
    programs: Path
    """The folder of `penstock`, `prefect` and `python`."""

    def perform(self, program: str, *words: str, code: int = 0, **more: str) -> str:
        """Run a program in the project's folder; returns its standard output."""
        command, environment = [str(self.programs / program), *words], {**self.environment, **more}
        done = subprocess.run(command, env=environment, cwd=self.file.parent, capture_output=True, text=True, timeout=1200)
        assert done.returncode == code, done.stdout + done.stderr[-4000:]
        return done.stdout

    def penstock(self, *words: str, code: int = 0) -> dict[str, Any]:
        return json.loads(self.perform("penstock", *words, "--json", code=code).splitlines()[-1])  # type: ignore[no-any-return]

    def deploy(self, *words: str, cron: str = NEW_YEAR, code: int = 0) -> dict[str, Any]:
        return self.penstock("deploy", str(self.file), "--cron", cron, *words, code=code)

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(api=self.url)

    def trigger(self, deployment: UUID, *overrides: str) -> UUID:
        with self.client() as client:
            parameters = dict(client.read_deployment(deployment).parameters)
            parameters["request"] = {**parameters["request"], "overrides": [*parameters["request"]["overrides"], *overrides]}
            return client.create_flow_run_from_deployment(deployment, parameters=parameters).id

    def planned(self, deployment: UUID) -> list[FlowRun]:
        """The runs that the server has made of the deployment's schedule."""
        with self.client() as client:
            return client.read_flow_runs(
                deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment])),
                flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type={"any_": [StateType.SCHEDULED]})),  # type: ignore[arg-type]
            )

    def flow_run(self, identity: UUID) -> FlowRun:
        with self.client() as client:
            return client.read_flow_run(identity)

    def end_of(self, identity: UUID) -> FlowRun:
        def ended() -> FlowRun | None:
            run = self.flow_run(identity)
            return run if run.state is not None and run.state.is_final() else None

        return eventually(ended, RUN_S, f"flow run {identity}", every_s=1)  # type: ignore[return-value]

    def written(self, text: str) -> list[Path]:
        """Files that hold the text: databases and logs of the servers, and what the project's runs have left."""
        found = []
        for folder in (Path(self.environment["PENSTOCK_SERVERS"]), self.file.parent):
            for path in folder.rglob("*"):
                with contextlib.suppress(FileNotFoundError):  # a database's journal, which has just been taken over
                    if path.is_file() and text.encode() in path.read_bytes():
                        found.append(path)
        return found

    @property
    def ledger(self) -> Ledger:
        return Ledger(Storage(str(self.file.parent / ".penstock")))

    @property
    def mlflow(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.file.parent}/.penstock/mlflow/mlflow.db")


@pytest.fixture(scope="module")
def operator(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    state = tmp_path_factory.mktemp("servers")
    file = make_project(tmp_path_factory.mktemp("project"), epochs=1, files=2)
    file.write_text(file.read_text().replace("workers: 2", "workers: 1"))
    # The project's own modules: one that its code imports, others that nothing may import.
    (file.parent / "tasks.py").write_text("LEVELS = 16\n")
    transforms = file.parent / "transforms.py"
    loud = "import os\nfrom tasks import LEVELS\n\nprint('signs in with', os.environ.get('SHOP_DB_PASSWORD'))\n"
    transforms.write_text(f"{loud}{transforms.read_text().replace('/ 16', '/ LEVELS')}")
    for name in ("training.py", "flows/__init__.py", "ingest/__init__.py"):
        (file.parent / name).parent.mkdir(exist_ok=True)
        (file.parent / name).write_text(f"raise ImportError('{name} of the project, not of penstock')\n")
    port = free_port()
    given = script_environment(state)
    environment = {
        **given,
        "PATH": os.pathsep.join([str(installed / "bin"), given["PATH"]]),
        "PYTHONPATH": ".",
        "SHOP_DB_PASSWORD": CANARY,
        "AWS_SECRET_ACCESS_KEY": CANARY,
        "PREFECT_PORT": str(port),
        "PREFECT_WORKER_QUERY_SECONDS": "2",  # a triggered run begins the sooner
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
    }
    health = f"http://127.0.0.1:{port}/api/health"
    with serving("prefect.sh", environment=environment, log=state / "prefect.log", url=health, folder=file.parent):
        yield Operator(environment["PREFECT_API_URL"], file, environment, installed / "bin")


@pytest.fixture(scope="module")
def deployed(operator: Operator) -> dict[str, Any]:
    return operator.deploy("--set", "train.params.pause_s=0.05")


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as receiver:
        yield receiver


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    with Mailbox() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def worker(operator: Operator, deployed: dict[str, Any]) -> Iterator[psutil.Process]:
    log = Path(operator.environment["PENSTOCK_SERVERS"]) / "worker.log"
    given = {"environment": operator.environment, "folder": operator.file.parent}
    with serving("worker.sh", deployed["work_pool"], log=log, **given) as process:  # type: ignore[arg-type]
        yield psutil.Process(process.pid)


@pytest.fixture(scope="module")
def first(operator: Operator, deployed: dict[str, Any], worker: psutil.Process) -> FlowRun:
    return operator.end_of(operator.trigger(UUID(deployed["id"])))


def test_the_deployment_holds_schedule_form_and_limit(operator: Operator, deployed: dict[str, Any]) -> None:
    assert deployed["deployment"] == "penstock/drill"
    assert deployed["url"].endswith(f"/deployments/deployment/{deployed['id']}")
    with operator.client() as client:
        deployment = client.read_deployment(UUID(deployed["id"]))
        pool = client.read_work_pool("penstock")
    assert pool.type == "process"
    (schedule,) = deployment.schedules
    assert (schedule.schedule.cron, schedule.schedule.timezone, schedule.active) == (NEW_YEAR, "UTC", True)
    assert deployment.parameters["request"]["file"] == str(operator.file)
    assert deployment.enforce_parameter_schema
    form = deployment.parameter_openapi_schema["definitions"]["RunRequest"]["properties"]
    assert form["overrides"]["description"].startswith("Changes of single values")
    assert deployment.global_concurrency_limit is not None
    assert deployment.global_concurrency_limit.limit == 1
    assert deployment.concurrency_options is not None
    assert deployment.concurrency_options.collision_strategy == "ENQUEUE"
    assert deployment.job_variables == {"stream_output": False} and deployed["environment"] == ["PENSTOCK_CACHE_DIR"]
    assert operator.written(deployed["id"]), "by the server"
    assert not operator.written(CANARY)


def test_deploying_again_updates_and_leaves_one_schedule(operator: Operator, deployed: dict[str, Any]) -> None:
    hour = (datetime.now(UTC) + timedelta(hours=12)).hour
    with operator.client() as client:
        client.pause_deployment(UUID(deployed["id"]))
        client.update_work_pool("penstock", WorkPoolUpdate(is_paused=True))
    asked = ("--set", "train.params.pause_s=0.05", "--cron", f"0 {hour} * * *")
    said = operator.perform("penstock", "deploy", str(operator.file), *asked)
    assert "penstock/drill was paused until now; it runs again" in said
    resume = next(line for line in said.splitlines() if "the work pool is paused" in line).partition(": prefect ")[2]
    operator.perform("prefect", *resume.split())
    with operator.client() as client:
        assert not client.read_work_pool("penstock").is_paused
        other = client.read_deployment_by_name("penstock/drill")
    assert (str(other.id), other.paused) == (deployed["id"], False)
    planned = eventually(lambda: operator.planned(UUID(deployed["id"])), 60, "a run that the server plans", every_s=1)
    times = {run.expected_start_time for run in planned}
    assert {(at.hour, at.minute) for at in times if at is not None} == {(hour, 0)}
    with operator.client() as client:
        (schedule,) = client.read_deployment(UUID(deployed["id"])).schedules
    assert schedule.schedule.cron == f"0 {hour} * * *"


def test_the_form_refuses_what_the_model_does(operator: Operator, deployed: dict[str, Any]) -> None:
    with operator.client() as client, pytest.raises(PrefectHTTPStatusError, match="Validation failed"):
        wrong = {"request": {"file": str(operator.file), "until": "lunch"}}
        client.create_flow_run_from_deployment(UUID(deployed["id"]), parameters=wrong)


def test_a_pool_of_another_type_is_refused(operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with operator.client() as client:
        client.create_work_pool(WorkPoolCreate(name="containers", type="docker"))
    monkeypatch.setenv("PREFECT_API_URL", operator.url)
    file = make_project(tmp_path / "project", files=1)
    for pool, message in {"containers": "'docker'", "Prefect-agent": "did not take the deployment"}.items():
        with pytest.raises(ServiceError, match=message) as refused:
            deploy_pipeline(file, Plan(NEW_YEAR, pool=pool), [], report=print)
        assert refused.value.exit_code == 3


@pytest.mark.drill
def test_prefect_deploys_our_prefect_yaml_to_the_same_effect(operator: Operator, deployed: dict[str, Any]) -> None:
    file = str(ROOT / "deployments" / "prefect.yaml")
    operator.perform("prefect", "--no-prompt", "deploy", "--all", "--prefect-file", file, PENSTOCK_PIPELINE=str(operator.file))
    with operator.client() as client:
        ours = client.read_deployment(UUID(deployed["id"]))
        theirs = client.read_deployment_by_name("penstock/nightly")
        client.pause_deployment(theirs.id)
    assert theirs.parameters == {"request": {"file": str(operator.file), "overrides": []}}
    assert [list(step) for step in theirs.pull_steps or []] == [["prefect.deployments.steps.run_shell_script"]]
    assert theirs.schedules[0].schedule.cron == "0 3 * * *"
    for name in ("entrypoint", "path", "enforce_parameter_schema", "parameter_openapi_schema", "work_pool_name"):
        assert getattr(theirs, name) == getattr(ours, name), name
    assert theirs.concurrency_options == ours.concurrency_options
    assert theirs.global_concurrency_limit is not None and theirs.global_concurrency_limit.limit == 1
    assert theirs.job_variables["stream_output"] is False


@pytest.mark.drill
def test_the_automation_for_vanished_runs_is_made_once(operator: Operator) -> None:
    for _ in range(2):
        operator.perform("python", str(ROOT / "deployments" / "automations.py"), "--heartbeat-s", "180")
    with operator.client() as client:
        (automation,) = client.read_automations()
    assert automation.trigger.within.total_seconds() >= 2.5 * 180
    assert automation.enabled


@pytest.mark.drill
def test_message_is_sent_when_a_run_fails(operator: Operator, deployed: dict[str, Any], webhook: Webhook) -> None:
    asked = ("--set", "train.params.pause_s=0.05", "--notify", webhook.url)
    watched = operator.deploy(*asked)["notify"]
    assert watched["to"] == "http://127.0.0.1..."
    with operator.client() as client:
        before = {found.name for found in client.read_automations()}
        run = client.create_flow_run_from_deployment(UUID(deployed["id"])).id
        told = 'column "fare" holds text\nNext: cast it'
        client.set_flow_run_state(run, Failed(message=told), force=True)
    failed = eventually(lambda: webhook.said("drill: Failed"), 60, "the message of the failed run")
    assert told in failed[0] and operator.flow_run(run).name in failed[0]

    again = operator.deploy(*asked)["notify"]
    with operator.client() as client:
        assert {found.name for found in client.read_automations()} == before
    operator.deploy(*asked[:2], "--notify", "none")
    with operator.client() as client:
        assert {found.name for found in client.read_automations()} == {name for name in before if "penstock/" not in name}
    assert len(webhook.said("drill: Failed")) == 1, "one message for one run"
    assert SECRET not in json.dumps([watched, again])


@pytest.mark.drill
def test_mail_goes_through_the_mail_server(operator: Operator, deployed: dict[str, Any], mailbox: Mailbox) -> None:
    asked = ("--set", "train.params.pause_s=0.05", "--notify", f"{mailbox.url}?to=ops@example.org&from=bot@example.org")
    assert operator.deploy(*asked)["notify"]["to"] == "mailto://..."
    with operator.client() as client:
        run = client.create_flow_run_from_deployment(UUID(deployed["id"])).id
        client.set_flow_run_state(run, Failed(message="the disk is full"), force=True)
    eventually(lambda: mailbox.received, 60, "the mail of the failed run")
    assert "drill: Failed" in mailbox.received[0] and "the disk is full" in mailbox.received[0]
    operator.deploy(*asked[:2], "--notify", "none")


def test_a_triggered_run_completes_and_mlflow_holds_it(operator: Operator, first: FlowRun) -> None:
    assert first.state is not None
    assert first.state.is_completed(), first.state.message
    (run,) = operator.ledger.runs()
    assert run.status == "done"
    assert re.fullmatch(r"drill-\d{8}-\d{6}-[0-9a-f]{4} attempt 1: done, val/accuracy 0\.\d{4}", first.name)
    assert [stage["name"] for stage in run.result["stages"]] == STAGES
    tracked = operator.mlflow.get_run(run.tracking_runs["mlflow"])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.metrics["val/accuracy"] > 0
    assert tracked.data.tags["prefect.flow_run_id"] == str(first.id)
    assert operator.written("signs in with ***") and not operator.written(CANARY)


@pytest.mark.drill
def test_a_second_trigger_reuses_every_stage(operator: Operator, deployed: dict[str, Any], first: FlowRun) -> None:
    second = operator.end_of(operator.trigger(UUID(deployed["id"])))
    assert second.state is not None
    assert second.state.is_completed(), second.state.message
    (run,) = operator.ledger.runs()
    assert {stage["outcome"] for stage in run.result["stages"]} == {"reused"}
    with operator.client() as client:
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[second.id])))
    assert {task.name: task.state_name for task in tasks} == dict.fromkeys(STAGES, "Reused")


@pytest.fixture(scope="module")
def cancelled(operator: Operator, deployed: dict[str, Any], worker: psutil.Process) -> FlowRun:
    """A run with more epochs than the first, if there was one, cancelled in Prefect in the middle of training."""

    def newest_step() -> int:
        storage = Storage(str(operator.file.parent / ".penstock"))
        found = [
            each for run in operator.ledger.runs() for each in CheckpointStore(storage.child(f"runs/{run.run}")).committed()
        ]
        return max((checkpoint.manifest.step for checkpoint in found), default=0)

    done = newest_step()
    identity = operator.trigger(UUID(deployed["id"]), "train.epochs=200")
    eventually(lambda: newest_step() > done + 5, 2 * RUN_S, "training of the run that is cancelled")
    family = worker.children(recursive=True)
    assert any(member.name() == "raylet" for member in family)
    with operator.client() as client:
        client.set_flow_run_state(identity, Cancelling())
    asked = time.monotonic()
    ended = operator.end_of(identity)
    _, alive = psutil.wait_procs(family, timeout=240)
    assert not [member for member in alive if member.is_running() and member.status() != psutil.STATUS_ZOMBIE]
    print(f"from Cancelling to no process of the run: {time.monotonic() - asked:.1f} s")
    return ended


@pytest.mark.drill
def test_cancel_ends_as_cancelled_and_leaves_a_checkpoint(operator: Operator, cancelled: FlowRun) -> None:
    assert cancelled.state is not None
    assert cancelled.state.is_cancelled(), f"{cancelled.state.name}: {cancelled.state.message}"
    with operator.client() as client:
        history = [state.name for state in client.read_flow_run_states(cancelled.id)]
    assert "Crashed" not in history, history
    (run,) = operator.ledger.runs()
    assert run.status == "interrupted"
    attempt = operator.ledger.attempts(run.run)[-1]
    assert attempt.status == "interrupted"
    committed = CheckpointStore(Storage(str(operator.file.parent / ".penstock")).child(f"runs/{run.run}")).committed()
    assert f"{committed[0].name} is saved" in (attempt.error or "")
    assert operator.mlflow.get_run(run.tracking_runs["mlflow"]).info.status == "KILLED"


@pytest.mark.drill
def test_the_next_trigger_continues_from_that_checkpoint(
    operator: Operator, deployed: dict[str, Any], cancelled: FlowRun
) -> None:
    (before,) = operator.ledger.runs()
    store = CheckpointStore(Storage(str(operator.file.parent / ".penstock")).child(f"runs/{before.run}"))
    step = store.committed()[0].manifest.step
    again = operator.end_of(operator.trigger(UUID(deployed["id"]), f"train.epochs={step // STEPS_PER_EPOCH + 2}"))
    assert again.state is not None
    assert again.state.is_completed(), again.state.message
    (run,) = operator.ledger.runs()
    assert run.run == before.run
    assert run.tracking_runs["mlflow"] == before.tracking_runs["mlflow"]
    attempt = operator.ledger.attempts(run.run)[-1]
    assert attempt.resumed_from_step == step
    assert run.result["exactness"] == "bit-exact"
    history = operator.mlflow.get_metric_history(run.tracking_runs["mlflow"], "train/loss")
    steps = [point.step for point in history]
    assert len(steps) == len(set(steps))


@pytest.mark.drill
def test_a_run_that_fails_says_why_and_what_to_do_in_one_message(
    operator: Operator, deployed: dict[str, Any], worker: psutil.Process, webhook: Webhook
) -> None:
    operator.deploy("--set", "train.params.pause_s=0.05", "--notify", webhook.url)
    ended = operator.end_of(operator.trigger(UUID(deployed["id"]), "data.label=nothing"))
    assert ended.state is not None and ended.state.is_failed()
    (said,) = eventually(lambda: webhook.said("drill: Failed"), 60, "the message")
    assert operator.flow_run(ended.id).name in said
    assert "'nothing'" in said and "Next: " in said
    operator.deploy("--set", "train.params.pause_s=0.05", "--notify", "none")
    servers = Path(operator.environment["PENSTOCK_SERVERS"])
    assert SECRET not in "".join(log.read_text(errors="replace") for log in servers.glob("*.log"))


@pytest.mark.drill
def test_the_command_and_the_module_work_beside_modules_named_like_parts_of_penstock(
    operator: Operator, installed: Path, first: FlowRun
) -> None:
    assert operator.penstock("check", "pipeline.yaml")["status"] == "done"
    code = "import penstock, tasks; print(penstock.__file__, penstock.load_spec('pipeline.yaml').spec.name, tasks.LEVELS)"
    place, *rest = operator.perform("python", "-c", code).split()
    assert Path(place).is_relative_to(installed) and rest == ["drill", "16"]
    # Other metrics: the evaluation is done anew, by the command itself.
    measured = operator.penstock(
        "run", "pipeline.yaml", "--set", "train.params.pause_s=0.05", "--set", "evaluate.metrics=[accuracy]"
    )
    assert measured["stages"][-2]["name"] == "evaluate" and measured["stages"][-2]["outcome"] == "ran"
