"""Does a person learn, within seconds and no more often than needed, which thing training waits for?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from penstock.errors import TrainingError
from penstock.training.events import (
    CheckpointCommitted,
    Event,
    Notice,
    Saving,
    TrainProgress,
    WorkersStarting,
    WorkerStarted,
    publish,
)
from penstock.training.on_ray.resources import gpus_of_auto, missing_for_workers
from penstock.training.on_ray.stacks import Place
from penstock.training.on_ray.watcher import Cluster, Watcher
from penstock.training.spec import TrainSpec


class Bench(Cluster):
    """Nodes that a test turns off, and a clock that it turns on."""

    def __init__(self, *cpus: float) -> None:
        self.now_s = 0.0
        self.known = [{"CPU": number} for number in cpus]
        self.head = True

    def head_answers(self) -> bool:
        return self.head

    def nodes(self) -> list[Mapping[str, float]]:
        return [*self.known]

    def free(self) -> Mapping[str, float]:
        return {"CPU": 0.0}

    def others(self) -> list[str]:
        return ["penstock run drive.yaml (pid 7 on 10.77.0.15)"]


def watch(bench: Bench, places: Mapping[int, Place] | None = None, **spec: float) -> Watcher:
    spec = {"stall_s": 1e6, **spec}
    clock = lambda: bench.now_s  # noqa: E731
    return Watcher(TrainSpec(recipe="a.py:B", workers=2, **spec), {"CPU": 1}, bench, clock, lambda _: lambda: places)


def seen(watcher: Watcher, *events: Event) -> list[str]:
    publish(events, watcher.handlers)
    return texts(watcher.due())


def started(watcher: Watcher, *nodes: int) -> None:
    ranks = [WorkerStarted(rank=rank, host=f"h{rank}", pid=1, restart=0, node=f"id{node}") for rank, node in enumerate(nodes)]
    seen(watcher, WorkersStarting(), *ranks)


def step(number: int) -> TrainProgress:
    return TrainProgress(step=number, total_steps=100, epoch=0, rows_per_s=1.0)


def lines(watcher: Watcher, bench: Bench, seconds: float) -> list[str]:
    """What is reported while so much time passes without an event."""
    shown: list[str] = []
    end_s = bench.now_s + seconds
    while bench.now_s < end_s:
        bench.now_s += 0.5
        shown += texts(watcher.due())
    return shown


def texts(events: Sequence[Event]) -> list[str]:
    return [event.message for event in events if isinstance(event, Notice)]


def test_known_long_step_prints_no_line() -> None:
    bench = Bench(1, 1)
    watcher = watch(bench)
    started(watcher, 0, 1)
    assert lines(watcher, bench, 20) == ["no step for 15 s; all workers have started"]
    seen(watcher, step(1))
    assert lines(watcher, bench, 60) == [f"no step for {s} s; the last one was 1" for s in (15, 30, 60)]
    seen(watcher, step(2))
    assert lines(watcher, bench, 62) == []
    assert lines(watcher, bench, 60) == ["no step for 120 s; the last one was 2"]


def test_long_write_is_named() -> None:
    bench = Bench(2)
    watcher = watch(bench)
    started(watcher, 0, 0)
    seen(watcher, step(5), Saving(step=5))
    assert lines(watcher, bench, 16) == ["no step for 15 s; the checkpoint of step 5 is being written"]
    seen(watcher, CheckpointCommitted(name="c", step=5), step(100))
    assert lines(watcher, bench, 40) == ["no step for 32 s; the last one was 100"]


def test_restart_names_lacking_cpus_and_ends_after_wait_s() -> None:
    bench = Bench(0, 1, 1)
    watcher = watch(bench, wait_s=60)
    started(watcher, 1, 2)
    seen(watcher, step(7))
    bench.known.pop()
    seen(watcher, WorkersStarting())
    first, *later = lines(watcher, bench, 59)
    assert first == (
        "waiting for the workers for 15 s; it lacks 1 more CPU: the cluster has 1, train.workers: 2 needs 2. The command ends "
        "in 45 s if they do not start (train.wait_s: 60); the same command continues"
    )
    assert len(later) == 1
    seen(watcher, WorkersStarting())  # asked again, the wait is the same
    with pytest.raises(TrainingError, match=r"within 60 s \(train.wait_s\): it lacks 1 more CPU") as ended:
        lines(watcher, bench, 5)
    assert "the same command, which continues" in ended.value.next_step


def test_wait_names_free_cpus_and_other_users() -> None:
    bench = Bench(2, 2)
    watcher = watch(bench, wait_s=60)
    seen(watcher, WorkersStarting())
    (line,) = lines(watcher, bench, 16)
    assert line == (
        "waiting for the workers for 15 s; 0 of 2 have started; 0 of the cluster's 4 CPUs are free; others use the cluster: "
        "penstock run drive.yaml (pid 7 on 10.77.0.15). The command ends in 45 s if they do not start (train.wait_s: 60); the "
        "same command continues"
    )
    started(watcher, 0, 1)
    assert seen(watcher, step(1)) == []
    assert lines(watcher, bench, 14) == []


def test_stall_names_ranks_that_do_not_wait_first() -> None:
    bench = Bench(1, 1)
    waits, stuck = (
        Place("waits for the other ranks (a.py:1 in f)", waits=True),
        Place("is in user code (b.py:2 in g)", waits=False),
    )
    watcher = watch(bench, {0: waits, 1: stuck}, stall_s=10)
    started(watcher, 0, 1)
    bench.now_s = 11
    (event,) = watcher.due()
    blamed = "rank 1 on h1 is in user code (b.py:2 in g)"
    message = f"no step for 11 s: {blamed}; rank 0 on h0 waits for the other ranks (a.py:1 in f)"
    assert event == Notice(message=message, blamed=blamed)
    bench.now_s = 21
    assert not [event for event in watcher.due() if isinstance(event, Notice) and event.blamed], (
        "the next one after twice as long"
    )
    assert seen(watcher, step(1)) == []
    bench.now_s += 9
    assert not [event for event in watcher.due() if isinstance(event, Notice) and event.blamed]


def test_silent_head_is_named_without_a_ray_call() -> None:
    bench = Bench(1, 1)
    watcher = watch(bench)
    started(watcher, 0, 1)
    seen(watcher, step(1))
    bench.head = False
    assert lines(watcher, bench, 16) == ["no step for 15 s; the head of the Ray cluster does not answer"]


@pytest.mark.parametrize(
    ("workers", "need", "nodes", "missing"),
    [
        (2, {"CPU": 1.0}, [{"CPU": 2.0}], None),
        (2, {"CPU": 0.5}, [{"CPU": 1.0}], None),
        (3, {"CPU": 0.1}, [{"CPU": 0.3}], None),
        (2, {"CPU": 1.0}, [{"CPU": 0.0}, {}], "2 more CPUs: the cluster has 0, train.workers: 2 needs 2"),
        (
            2,
            {"CPU": 3.0},
            [{"CPU": 2.0}, {"CPU": 2.0}],
            "2 more CPUs: the cluster has 4, train.workers: 2 with train.cpus_per_worker: 3 needs 6",
        ),
        (1, {"CPU": 3.0}, [{"CPU": 2.0}], "1 more CPU: the cluster has 2, 1 worker with train.cpus_per_worker: 3 needs 3"),
        (
            1,
            {"CPU": 3.0},
            [{"CPU": 2.0}, {"CPU": 2.0}],
            "nodes that hold 1 worker of 3 CPU (train.workers, train.cpus_per_worker): there is room for 0, the nodes have "
            "2 CPU; 2 CPU",
        ),
        (2, {"CPU": 1.0, "tape": 1.0}, [{"CPU": 4.0, "tape": 1.0}], "1 more tape: the cluster has 1, train.workers: 2 needs 2"),
        (2, {"CPU": 1.0, "GPU": 1.0}, [{"CPU": 4.0, "GPU": 1.0}], "1 more GPU: the cluster has 1, train.workers: 2 needs 2"),
    ],
)
def test_worker_needs_are_compared_by_node(
    workers: int, need: dict[str, float], nodes: list[dict[str, float]], missing: str | None
) -> None:
    assert missing_for_workers(workers, need, nodes) == missing


def test_gpus_auto_explains_unused_gpus() -> None:
    one = [{"CPU": 4.0, "GPU": 1.0}]
    assert gpus_of_auto(1, 1, one, None) == (1.0, "on 1 GPU (train.gpus: auto)", False)
    assert gpus_of_auto(2, 1, one, {"CPU": 64.0, "GPU": 8.0})[0] == 1.0
    gpus, why, warns = gpus_of_auto(2, 1, one, None)
    assert (gpus, warns) == (0.0, True)
    assert "lacks 1 more GPU: the cluster has 1, train.workers: 2 needs 2. To use GPUs, lower train.workers" in why
    gpus, why, warns = gpus_of_auto(2, 1, [{"CPU": 4.0}], None)
    assert (gpus, warns) == (0.0, False) and why == "on CPUs: there is no GPU now (train.gpus: auto)"
