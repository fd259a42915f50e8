"""Does an attempt on Ray Train survive the death of a worker, obey a stop, and tell the first cause of a failure?"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from ray.core.generated.autoscaler_pb2 import ClusterConfig, NodeGroupConfig

from penstock.errors import TrainingError
from penstock.tasks.evaluate import measure_checkpoint
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.events import CheckpointCommitted, Event, Notice, Printed, TrainProgress, WorkerStarted
from penstock.training.frameworks.torch.framework import TORCH
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, own_device
from penstock.training.on_ray import one_worker, trainer
from penstock.training.on_ray.mailbox import RayMailboxClient
from penstock.training.on_ray.one_worker import on_one_worker, worker_needs
from penstock.training.on_ray.trainer import TrainOutcome, train
from penstock.training.on_ray.worker import RankResult, run_rank
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from tests.runs.forked import fork_workers_from_here
from tests.runs.servers import eventually
from tests.training.digits import make_job, train_alone

pytestmark = pytest.mark.slow

SLOW_SAYS = ("and logged", "and to stderr", "rows: 24")
"""In each step; and nothing that Ray or a library tells of itself is among it."""

SLOW: dict[str, Any] = {
    "recipe": "Slow",
    "params": {"seconds": 0.12},
    "workers": 2,
    "checkpoint": {"every_steps": 3, "every_s": None},
}


def slow_until(file: Path) -> dict[str, Any]:
    """The same, held in its fourth step until there is the file: what a test does comes in time on any machine."""
    return {**SLOW, "params": {**SLOW["params"], "until": str(file)}}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A local Ray of two CPUs, whose workers are forked."""
    fork_workers_from_here()
    connect()
    yield
    ray.shutdown()


def connect() -> None:
    ray.shutdown()  # what tests before left running has other resources, or has some of them taken
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)


class Watcher:
    """Keeps the listener's events and acts once training has passed a step or saved one; then there is the file `done`."""

    def __init__(
        self,
        at_step: int | None = None,
        act: Callable[[dict[int, int]], None] | None = None,
        done: Path | None = None,
        kind: type[TrainProgress | CheckpointCommitted] = TrainProgress,
    ) -> None:
        self.events: list[Event] = []
        self.pids: dict[int, int] = {}
        self._at_step, self._act, self._done, self._kind = at_step, act, done, kind

    def __call__(self, events: list[Event]) -> None:
        """Hear."""
        self.events.extend(events)
        for event in events:
            if isinstance(event, WorkerStarted):
                self.pids[event.rank] = event.pid
            if isinstance(event, self._kind) and self._act and self._at_step is not None and event.step >= self._at_step:
                act, self._act = self._act, None
                act(self.pids)
                if self._done:
                    self._done.touch()


def run(folder: Path, name: str, listener: Callable[[list[Event]], None], **more: Any) -> TrainOutcome:
    given = {key: more.pop(key) for key in ("own_cluster", "work") if key in more}
    stop = more.pop("stop", threading.Event())
    return train(make_job(folder, run=name, **more), stop=stop, listener=listener, **given)


def actors_alive() -> set[str]:
    """Names of the classes of this cluster's actors; forked workers of other clusters have the same parent process."""
    return {actor["ActorClassName"] for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"}


def run_until_told_to_stop(job: TrainJob, group: Group, client: RayMailboxClient, **more: Any) -> RankResult:
    """A rank's work, held until it has heard that it is to stop."""
    put = client.put

    def told(events: list[Event]) -> bool:
        if stop := put(events):
            Path(job.spec.params["until"]).touch()
        return stop

    client.put = told  # type: ignore[method-assign]
    return run_rank(job, group, client, **more)


@pytest.mark.drill
def test_deaths_and_a_stop_change_no_weights(tmp_path: Path) -> None:
    """One run of three attempts: a death that no retry is left for, a stop, and a death with a retry."""
    actors: set[str] = set()
    done = tmp_path / "done"
    watcher = Watcher(1, lambda pids: actors.update(actors_alive()), done)
    slow = slow_until(done)
    whole = run(tmp_path, "whole", watcher, **slow)
    assert "_AutoscalingCoordinatorActor" in actors, "a cluster that others gave is asked for workers: it may grow"
    assert (whole.status, whole.step, whole.restarts, whole.exactness) == ("finished", 14, 0, "bit-exact")

    done.unlink()
    watcher = Watcher(3, lambda pids: os.kill(pids[1], signal.SIGKILL), done, kind=CheckpointCommitted)
    with pytest.raises(TrainingError, match="the process of rank 1 died"):
        run(tmp_path, "killed", watcher, **slow, retries=0)

    stop = threading.Event()
    done.unlink()
    watcher = Watcher(at_step=5, act=lambda pids: stop.set())
    stopped = run(tmp_path, "killed", watcher, **slow, attempt=2, stop=stop, work=run_until_told_to_stop)
    assert stopped.status == "interrupted" and 5 <= stopped.step < 14
    committed = [event.name for event in watcher.events if isinstance(event, CheckpointCommitted)]
    assert stopped.checkpoint == committed[-1]

    done.unlink()
    watcher = Watcher(at_step=stopped.step + 1, act=lambda pids: os.kill(pids[1], signal.SIGKILL), done=done)
    killed = run(tmp_path, "killed", watcher, **slow, attempt=3)
    assert (killed.status, killed.step, killed.restarts) == ("finished", 14, 1)
    assert killed.resumed_from_step is not None and killed.resumed_from_step >= stopped.step
    assert killed.exactness == "bit-exact"
    assert killed.weights_digest == whole.weights_digest
    assert killed.metrics == whole.metrics
    restarts = [(event.rank, event.restart) for event in watcher.events if isinstance(event, WorkerStarted)]
    assert sorted(restarts) == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.drill
def test_unneeded_processes_stay_off_failing_listener_stops_nothing(tmp_path: Path) -> None:
    connect()  # the actor that is asked for workers lives as long as the cluster
    actors: set[str] = set()
    done = tmp_path / "done"
    watcher = Watcher(1, lambda pids: actors.update(actors_alive()), done)

    def listen(events: list[Event]) -> None:
        watcher(events)
        raise ConnectionError("the tracker is away")

    outcome = run(tmp_path, "lean", listen, **slow_until(done), max_steps=4, own_cluster=True)
    assert outcome.status == "finished"
    assert outcome.warnings == ["training events could not be passed on: ConnectionError: the tracker is away"]
    printed = [(event.rank, line) for event in watcher.events if isinstance(event, Printed) for line in event.lines]
    assert sorted(printed) == [(rank, line) for rank in (0, 1) for line in SLOW_SAYS for _step in range(4)]
    assert {"TrainController", "RayTrainWorker", "Mailbox"} <= actors
    assert not {"_AutoscalingCoordinatorActor", "DatasetManager", "PlacementGroupCleaner"} & actors


@pytest.mark.drill
def test_stopped_rank_is_named_and_all_restart(tmp_path: Path) -> None:
    done = tmp_path / "done"
    watcher = Watcher(at_step=1, act=lambda pids: os.kill(pids[1], signal.SIGSTOP), done=done)
    outcome = run(tmp_path, "stopped", watcher, **slow_until(done), max_steps=8, stall_s=3)
    assert (outcome.status, outcome.restarts) == ("finished", 1)
    (message, *_), _ = zip(
        *((event.message, event.blamed) for event in watcher.events if isinstance(event, Notice) and event.blamed), strict=True
    )
    assert "rank 1 was stopped (SIGSTOP)" in message and "rank 0 waits for the other ranks (" in message


def lost_disk_once(*arguments: Any, restart: int = 0, **more: Any) -> RankResult:
    """A rank's work, which fails in the first worker with no user's error."""
    assert dist.get_world_size() == 1, "a recipe may ask"
    if restart == 0:
        raise OSError("the disk was away")
    return run_rank(*arguments, restart=restart, **more)


@pytest.mark.drill
def test_lone_worker_task_restarts_after_death_or_machine_failure(tmp_path: Path) -> None:
    connect()  # Ray Train's actors of the tests before may still be ending beside the worker
    done = tmp_path / "done"
    alone = {**slow_until(done), "workers": 1, "max_steps": 7}
    actors: set[str] = set()
    whole = run(tmp_path, "whole", Watcher(1, lambda pids: actors.update(actors_alive()), done), **alone)
    assert "Mailbox" in actors and not {"TrainController", "RayTrainWorker"} & actors

    done.unlink()
    watcher = Watcher(3, lambda pids: os.kill(pids[0], signal.SIGKILL), done, kind=CheckpointCommitted)
    killed = run(tmp_path, "killed", watcher, **alone)
    assert (killed.status, killed.restarts) == ("finished", 1) and killed.resumed_from_step == 3
    assert killed.weights_digest == whole.weights_digest and killed.exactness == "bit-exact"

    failed = run(tmp_path, "failed", Watcher(), **alone, work=lost_disk_once)
    assert (failed.status, failed.restarts, failed.weights_digest) == ("finished", 1, whole.weights_digest)
    with pytest.raises(TrainingError, match="rank 0: OSError: the disk was away"):
        run(tmp_path, "once", Watcher(), **alone, retries=0, work=lost_disk_once)


def test_lone_worker_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "STOP_GRACE_S", 0.5)
    monkeypatch.setattr(trainer, "KILL_GRACE_S", 3600.0)  # nobody gives up on Ray: only a worker that is gone ends the attempt
    stop = threading.Event()

    def stop_in_the_first_step(events: list[Event]) -> None:
        if any(isinstance(event, WorkerStarted) for event in events):
            stop.set()

    stuck = {**SLOW, "workers": 1, "params": {"seconds": 3600}}
    outcome = run(tmp_path, "stuck", stop_in_the_first_step, **stuck, stop=stop)
    assert (outcome.status, outcome.step, outcome.checkpoint) == ("interrupted", 0, None)


@pytest.mark.drill
def test_recipe_bug_is_reported_once_without_retry(tmp_path: Path) -> None:
    watcher = Watcher()
    with pytest.raises(TrainingError, match=r"loss\(\) failed: ValueError: this recipe is broken .*recipes\.py:\d+"):
        run(tmp_path, "broken", watcher, recipe="Broken", workers=2)
    assert {event.restart for event in watcher.events if isinstance(event, WorkerStarted)} == {0}


@pytest.mark.parametrize("started", [pytest.param(0, id="while Ray Train starts"), pytest.param(2, id="while it trains")])
@pytest.mark.drill
def test_interruption_leaves_no_thread_in_ray(tmp_path: Path, started: int) -> None:
    """Ray ends a process in which a thread uses it after `ray.shutdown()`: exit code 1, and no message."""
    watcher = Watcher()

    class NeverSet(threading.Event):
        def is_set(self) -> bool:  # asked after every poll
            if len(watcher.pids) == started:
                signal.setitimer(signal.ITIMER_REAL, 0.1)  # in the middle of the next one
            return False

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "run", watcher, **SLOW, stop=NeverSet())
    finally:
        signal.signal(signal.SIGALRM, before)
    left = [thread for thread in threading.enumerate() if thread.name == "penstock-fit"]
    for thread in left:
        thread.join(60)
    assert not any(thread in threading.enumerate() for thread in left)
    workers = [psutil.Process(pid) for pid in watcher.pids.values() if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(workers, timeout=240)[1]
    connect()


def test_cluster_evaluation_gives_the_same_numbers(tmp_path: Path) -> None:
    job = make_job(tmp_path, max_steps=3)
    train_alone(job)
    (checkpoint,) = CheckpointStore(job.run_storage).committed()
    loader = TORCH.loader
    model = ModelSpec(code=job.code, params=job.spec.params, feed_schema=job.manifest.feed_schema, loader=loader)
    measure = partial(measure_checkpoint, job, model, checkpoint.storage, splits=["validation", "test"])
    said: list[str] = []
    here, there = measure(), on_one_worker(job.spec, "evaluate", measure, said.append)
    assert said == ["evaluate: on CPUs: there is no GPU now (train.gpus: auto)"]
    assert there.metrics == here.metrics and len(here.metrics) == 6
    assert (there.figures, there.tables) == (here.figures, here.tables)


def test_model_is_measured_on_its_assigned_gpu_only(tmp_path: Path) -> None:
    spec = make_job(tmp_path, gpus=0).spec
    assert on_one_worker(spec, "evaluate", device_where_torch_sees_gpus, print) == "cpu"
    assert on_one_worker(spec, "evaluate", partial(device_where_torch_sees_gpus, given=["0"]), print) == "cuda"
    assert device_where_torch_sees_gpus() == "cuda"


def device_where_torch_sees_gpus(given: list[str] | None = None) -> str:
    """On a node with a GPU; `given` is what Ray says in place of what it has given."""
    ids = mock.patch.object(ray, "get_gpu_ids", lambda: given) if given else contextlib.nullcontext()
    with mock.patch.object(torch.cuda, "is_available", lambda: True), ids:
        return own_device().type


def test_cluster_task_death_and_error_reach_the_driver() -> None:
    spec = TrainSpec(recipe="model.py:Net")
    with pytest.raises(TrainingError, match="the first batch: the process on the cluster died"):
        on_one_worker(spec, "the first batch", partial(os._exit, 3), print)
    with pytest.raises(FileNotFoundError):
        on_one_worker(spec, "the first batch", partial(os.stat, "/nowhere"), print)


def wait_until_cancelled(begun: Path) -> Iterator[None]:
    begun.touch()
    time.sleep(600)
    yield


@pytest.mark.timeout(120)
def test_error_of_cancelled_work_is_taken(tmp_path: Path) -> None:
    """Ray prints an error that nobody takes."""
    parts = ray.remote(max_retries=0, num_returns="streaming")(wait_until_cancelled).remote(tmp_path / "begun")
    eventually((tmp_path / "begun").exists, 60, "the begin of the work")
    one_worker._cancel(parts)
    with pytest.raises(StopIteration):
        next(parts)


def loud(words: str) -> None:
    print("printed", words)
    print("printed", words, file=sys.stderr)
    raise ConnectionError(f"refused {words}")


def test_output_of_one_worker_hides_secrets_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    spec = TrainSpec(recipe="model.py:Net")
    logs = Path(on_one_worker(spec, "the first batch", partial(os.readlink, "/proc/self/fd/1"), print)).parent
    with pytest.raises(Exception, match=r"refused http://\*\*\*@host"):
        on_one_worker(spec, "the first batch", partial(loud, "http://alice:canary@host"), print)
    written = [file.read_text() for file in logs.glob("worker-*")]
    assert sum("printed http://***@host" in text for text in written) == 2
    assert capsys.readouterr().out.count("\nprinted http://***@host") == 2
    assert not any("canary" in text for text in written)


@ray.remote(num_cpus=2)
class Others:
    """Another user's work, on all CPUs."""


def test_full_cluster_times_out_with_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.training.on_ray.watcher.FIRST_S", 0.1)
    others = Others.remote()
    ray.get(others.__ray_ready__.remote())
    spec = TrainSpec(recipe="model.py:Net", workers=2, gpus=0, wait_s=3)
    said: list[str] = []
    with pytest.raises(
        TrainingError, match=r"the workers could not start within 3 s \(train.wait_s\): 0 of 1 have started; 0 of"
    ):
        on_one_worker(spec, "evaluate", (tmp_path / "late").touch, said.append)
    free = r"0 of the cluster's 2 CPUs are free\. The command ends in \d s"
    assert re.match(rf"evaluate: waiting for the workers for [0-3] s; 0 of 1 have started; {free}", said[0])
    with pytest.raises(TrainingError, match="could not start within 1 s"):  # it may share CPUs, and no tape
        on_one_worker(
            spec.model_copy(update={"wait_s": 1, "resources": {"tape": 1.0}}),
            "evaluate",
            (tmp_path / "no tape").touch,
            said.append,
            has_trained=True,
        )
    assert not any("begins beside" in line for line in said)
    later = spec.model_copy(update={"wait_s": 60})
    on_one_worker(later, "evaluate", (tmp_path / "beside").touch, said.append, has_trained=True)
    assert "evaluate: begins beside the others, whose CPUs it shares: its run has trained" in said
    ray.kill(others)
    on_one_worker(later, "evaluate", (tmp_path / "next").touch, said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "next"]


def grows_to(*groups: tuple[dict[str, float], int]) -> None:
    """Tell Ray what an autoscaler tells it: (resources of a node, most nodes) of each group."""
    config = ClusterConfig(node_group_configs=[NodeGroupConfig(resources=each, max_count=most) for each, most in groups])
    ray._private.worker.global_worker.gcs_client.report_cluster_config(config.SerializeToString())


def test_autoscaler_gpus_time_out_with_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.training.on_ray.watcher.FIRST_S", 0.1)
    spec = TrainSpec(recipe="model.py:Net", workers=2, cpus_per_worker=1, wait_s=1)
    said: list[str] = []
    try:
        grows_to(({"CPU": 8, "GPU": 1}, 2))
        need, (told,) = worker_needs(spec)
        with pytest.raises(TrainingError, match=r"within 1 s \(train.wait_s\): it lacks 1 more GPU: the cluster has 0"):
            on_one_worker(spec, "evaluate", os.getpid, said.append)
    finally:
        grows_to()
    assert need == {"CPU": 1, "GPU": 1}
    assert told == Notice(message="on 2 workers of 1 GPU each, which the cluster can grow to (train.gpus: auto)")
    lacks = "it lacks 1 more GPU: the cluster has 0, 1 worker needs 1. The command ends in"
    assert lacks in said[0] and "(train.wait_s: 1)" in said[0]
    assert worker_needs(spec)[0] == {"CPU": 1}
