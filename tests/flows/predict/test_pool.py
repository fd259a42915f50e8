"""One function over many items in a pool of processes: how often it is made, its output, and its errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import DataError, PreflightError
from penstock.flows.predict.pool import ray_pool
from tests.conformance.conftest import ray_cluster  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def test_pool_makes_function_once_per_process_and_restart(tmp_path: Path) -> None:
    def make() -> Callable[[int], int]:
        (tmp_path / f"made-{os.getpid()}").touch()

        def work(item: int) -> int:
            if item == 3 and not (tmp_path / "died").exists():
                (tmp_path / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return item * item

        return work

    assert sorted(ray_pool(make, list(range(8)), processes=2)) == [item * item for item in range(8)]
    assert len(list(tmp_path.glob("made-*"))) == 3


def test_pool_process_without_gpu_sees_none() -> None:
    assert list(ray_pool(lambda: os.environ.get, ["CUDA_VISIBLE_DEVICES"], processes=1)) == [""]


def test_pool_error_is_raised_unchanged() -> None:
    def make() -> Callable[[int], int]:
        raise DataError("no model", next_step="train one")

    with pytest.raises(DataError, match="no model") as caught:
        list(ray_pool(make, [1, 2, 3], processes=2))
    assert caught.value.next_step == "train one"


def test_pool_output_is_printed_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    def tell(item: int) -> None:
        print("connected with", f"http://alice:canary@host/{item}")
        if item > 1:
            raise ValueError("refused")

    assert list(ray_pool(lambda: tell, [1], processes=1)) == [None]
    with pytest.raises(Exception, match="refused"):
        list(ray_pool(lambda: tell, [2], processes=1))
    assert capsys.readouterr().out == "".join(f"connected with http://***@host/{n}\n" for n in (1, 2))


@pytest.mark.drill
def test_pool_process_that_always_dies_is_refused() -> None:
    with pytest.raises(PreflightError, match="a process on the cluster died each time it was started"):
        list(ray_pool(lambda: os._exit, [3], processes=1))
