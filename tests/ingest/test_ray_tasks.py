"""Functions over many items as Ray tasks: their results, their errors, and what is left running when nobody reads on."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import ray

from penstock.errors import DataError, PreflightError, ServiceError
from penstock.ingest.ray_tasks import raising_ours, ray_map, ray_streams
from tests import ROOT
from tests.conformance.conftest import ray_cluster  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def test_results_are_those_of_the_items() -> None:
    assert sorted(ray_map(lambda item: item * item, list(range(7)))) == [item * item for item in range(7)]
    assert list(ray_map(lambda item: item, [])) == []


def test_worker_error_is_raised_unchanged() -> None:
    def fail(item: int) -> int:
        raise DataError("part-7.csv, row 3: no number", problems=["a", "b"], next_step="repair it")

    with pytest.raises(DataError) as caught:
        list(ray_map(fail, [1, 2]))
    assert type(caught.value) is DataError
    assert (caught.value.problems, caught.value.next_step) == (("a", "b"), "repair it")
    assert str(caught.value) == "part-7.csv, row 3: no number\n  - a\n  - b\nNext: repair it"


def test_full_disk_of_worker_is_reported() -> None:
    def fail(item: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/the/shard")

    with pytest.raises(OSError) as caught:
        list(ray_map(fail, [1]))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/the/shard")


def test_task_output_is_printed_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    def tell(item: int) -> str:
        logging.getLogger().handlers.clear()  # of a test before, in the same process
        print("connected with", f"http://alice:canary@host/{item}")
        warnings.warn(f"old {item}", stacklevel=1)
        logging.getLogger("their.own").warning("slow %d", item)
        if item > 3:
            raise ValueError("refused")
        return os.readlink("/proc/self/fd/1")

    def stream(item: int) -> Iterator[str]:
        yield tell(item)

    files = {1: next(ray_map(tell, [1]))}
    files[2] = ray.get(next(next(ray_streams(stream, [2]))))
    for item, file in files.items():
        text = Path(file).read_text()
        assert f"connected with http://***@host/{item}\n" in text and "canary" not in text
    with pytest.raises(Exception, match="refused"):
        list(ray_map(tell, [4]))
    here = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  warnings.warn")]
    told = [re.sub(r".*: (?=UserWarning)", "", line) for line in here]
    assert told == [
        line for n in (1, 4) for line in (f"connected with http://***@host/{n}", f"UserWarning: old {n}", f"slow {n}")
    ]


def test_an_unexpected_error_keeps_its_message() -> None:
    with pytest.raises(Exception, match="surprise"):
        list(ray_map(lambda item: {}["surprise"], [1]))


@pytest.mark.drill
def test_process_that_always_dies_is_a_preflight_error() -> None:
    with pytest.raises(PreflightError, match="a process on the cluster died each time it was started") as told:
        list(ray_map(os._exit, [3]))
    assert told.value.next_step.startswith("check the memory of the nodes")


def test_work_lost_by_ray_is_a_service_error() -> None:
    for lost in (ray.exceptions.RaySystemError("closed"), ray.exceptions.ActorUnavailableError("away", None)):
        with pytest.raises(ServiceError, match=f"Ray lost the running work: {type(lost).__name__}"), raising_ours():
            raise lost


def test_streams_are_read_in_the_order_of_their_items() -> None:
    def count(item: int) -> Iterator[int]:
        time.sleep(0.2 if item == 0 else 0)  # the first is the last to be done
        yield from range(item * 10, item * 10 + item)

    for at_once, ahead in ((1, 1), (2, 1), (None, None)):
        streams = ray_streams(count, [0, 1, 2, 3], cpus=0.25, at_once=at_once, ahead=ahead)
        assert [[ray.get(reference) for reference in stream] for stream in streams] == [[], [10], [20, 21], [30, 31, 32]]


def test_a_stream_waits_for_its_reader(tmp_path: Path) -> None:
    def tell(item: int) -> Iterator[int]:
        for number in range(20):
            (tmp_path / f"{item}-{number}").touch()
            yield number

    streams = ray_streams(tell, [0, 1, 2], cpus=0.25, at_once=2, ahead=2)
    assert [ray.get(reference) for reference in islice(next(streams), 15)] == list(range(15))
    assert {int(path.name[0]) for path in tmp_path.iterdir()} <= {0, 1}
    assert len(list(tmp_path.glob("0-*"))) <= 15 + 2 + 1
    assert len(list(tmp_path.glob("1-*"))) <= 2 + 1


@pytest.mark.parametrize("ahead", [2, None])
def test_stream_continues_after_worker_is_killed(tmp_path: Path, ahead: int | None) -> None:
    def die_once(item: int) -> Iterator[int]:
        for number in range(10):
            if number == 5 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield item + number

    for stream in ray_streams(die_once, [0], ahead=ahead):
        assert [ray.get(reference) for reference in stream] == list(range(10))
    assert (tmp_path / "died").exists()


def test_error_comes_after_running_tasks_end(tmp_path: Path) -> None:
    def fail_first(item: int) -> None:
        if item == 0:
            (tmp_path / "0 failed").touch()
            raise DataError("the first")
        (tmp_path / f"{item} began").touch()
        while not (tmp_path / "0 failed").exists():
            time.sleep(0.01)
        time.sleep(0.5)  # the first has failed, and this one is still at work
        (tmp_path / f"{item} ended").touch()

    with pytest.raises(DataError, match="the first"):
        list(ray_map(fail_first, range(50)))
    done = {path.name for path in tmp_path.iterdir()}
    of_begun = {f"{item} {what}" for item in (1, 2, 3) for what in ("began", "ended")}  # two run, and as many wait
    assert done == of_begun | {"0 failed"}
    assert list(ray_map(abs, [-1])) == [1]
    assert {path.name for path in tmp_path.iterdir()} == done


def test_a_cluster_may_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([8, 8, 2, 2, 1])
    monkeypatch.setattr("penstock.ingest.ray_tasks._in_flight", lambda *_: next(sizes, 2))
    assert sorted(ray_map(abs, range(12))) == list(range(12))
    sizes = iter([8, 8, 2, 2, 1])
    streams = ray_streams(lambda item: iter([item]), range(12))
    assert [ray.get(next(stream)) for stream in streams] == list(range(12))


STOPPING = """
import ray
from penstock.ingest.ray_tasks import ray_map, ray_streams

ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
for _ in range(600):
    results = ray_map(abs, range(100))
    next(results)
    results.close()
for _ in range(100):
    streams = ray_streams(lambda item: map(abs, range(20)), range(100), at_once=4, ahead=2)
    ray.get(next(next(streams)))
    streams.close()
print("alive")
"""


@pytest.mark.drill
def test_stopping_while_tasks_end_does_not_abort() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPING], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]
