"""Do values that user code logs, and what it prints, reach the run: from any place, step by step, added up over the ranks?"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint.journal import read_journal
from penstock.training.own_values import OwnValues, collecting, mlflow_warning
from penstock.training.ranks import Group
from tests.training.digits import CPU, ROWS, make_job, train_alone
from tests.training.ranks import run_ranks, train_ranks

STEPS = 14


def charts(folder: Path, run: str) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for point in read_journal(Storage(str(folder / run)), STEPS):
        for name, value in point.values.items():
            found.setdefault(name, {})[point.step] = value
    return found


def test_logged_values_are_equal_on_one_and_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_alone(make_job(tmp_path, run="one", recipe="Logging", params={"dropout": 0.0}))
    train_ranks(make_job(tmp_path, run="two", recipe="Logging", params={"dropout": 0.0}, workers=2))
    one, two = charts(tmp_path, "one"), charts(tmp_path, "two")
    steps = set(range(1, STEPS + 1))
    for found in (one, two):
        assert [found["train/rows"][step] for step in (1, 7)] == [48.0, ROWS["train"] - 6 * 48]
        assert set(found["train/rows"]) == set(found["train/twice"]) == steps
        assert found["train/twice"] == pytest.approx({step: 2 * loss for step, loss in found["train/loss"].items()}, rel=1e-6)
        assert found["val/twice"] == pytest.approx({step: 2 * loss for step, loss in found["val/loss"].items()}, rel=1e-6)
        assert found["val/rows"] == {7: ROWS["validation"], STEPS: ROWS["validation"]}
    assert two["train/mean_label"] == pytest.approx(one["train/mean_label"], rel=1e-6)
    assert 0 < len(one["mine/sometimes"]) < STEPS and set(one["mine/sometimes"].values()) == {1.0}
    assert {"workers/0/data_wait_s", "workers/1/data_wait_s"} <= two.keys() - one.keys()
    assert "label of the first row" in capsys.readouterr().out


def log_on_one_rank(group: Group) -> list[dict[str, float]]:
    with collecting(OwnValues(group, "train")) as own:
        if group.rank == 1:
            penstock.log("mine", 3.0)
            thread = threading.Thread(target=penstock.log, args=("mine", torch.tensor(5.0)))
            thread.start()
            thread.join()
        penstock.log("all", group.rank + 1, reduce="sum")
        return [own.totals(), own.totals()]


def test_value_of_one_rank_or_thread_counts_once() -> None:
    assert run_ranks(log_on_one_rank, 2) == [[{"train/all": 3.0, "train/mine": 4.0}, {}]] * 2


def test_invalid_values_are_refused_by_name() -> None:
    with pytest.warns(UserWarning, match="outside of training"):
        penstock.log("kl", 1.0)
    with collecting(OwnValues(Group(0, 1, CPU), "train")):
        for name, value, problem in [
            ("loss", 1.0, "penstock's own chart"),
            ("a?", 1.0, "letters, digits"),
            ("kl", torch.zeros(3), r"a tensor of shape \[3\]"),
            ("kl", "x", "not a number"),
        ]:
            with pytest.raises(TrainingError, match=problem):
                penstock.log(name, value)
        penstock.log("kl", 1.0)
        with pytest.raises(TrainingError, match="it was 'mean' before"):
            penstock.log("kl", 1.0, reduce="sum")


def test_import_of_mlflow_in_user_code_is_warned_of() -> None:
    assert "log values with penstock.log" in str(mlflow_warning(["numpy", "mlflow-skinny"]))
    assert mlflow_warning(["numpy"]) is None
