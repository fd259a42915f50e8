"""The introduction to Ray Train and Ray Data. The table is in README.md."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from sklearn.datasets import load_digits

from penstock.errors import TrainingError
from penstock.training.frameworks.ray_train.framework import RAY_TRAIN
from penstock.training.model import ModelSpec, load_model
from tests.guides.running import Prepared, checkpoints, killed, prepare, reports, run_alone, run_on_two

LOOP = "intro_programs.py:train_loop_per_worker"
PARAMS = {"lr": 1e-3, "batch_size": 64, "epochs": 2}


def digits(folder: Path) -> Prepared:
    """Pictures as lists of lists, as a frame of Python lists writes them."""
    images, labels = load_digits(return_X_y=True)
    table = pa.table({"image": images[:300].reshape(-1, 8, 8).astype("uint8").tolist(), "label": labels[:300]})
    (folder / "intro_programs.py").write_bytes((Path(__file__).parent / "intro_programs.py").read_bytes())
    return prepare(folder, {"train": table}, [{"map_batches": "intro_programs.py:scaled"}], label="label")


def test_global_batch_is_divided_and_the_model_is_loaded_again(tmp_path: Path) -> None:
    prepared = digits(tmp_path)
    one = prepared.job(LOOP, PARAMS)
    assert run_alone(one).printed == [f"epoch {epoch} sizes 64 64 64 64 44" for epoch in (0, 1)]
    two = prepared.job(LOOP, PARAMS, run="two", workers=2)
    ran = run_on_two(two)
    assert [each.printed for each in ran] == [[f"epoch {epoch} sizes 32 32 32 32 22" for epoch in (0, 1)]] * 2
    assert reports(two, "epoch") == [0, 1] and len(reports(two, "loss")) == 2
    spec = ModelSpec(code=two.code, params=PARAMS, feed_schema=two.manifest.feed_schema, loader=RAY_TRAIN.loader)
    model = load_model(spec, checkpoints(two)[0].storage)
    assert model.predict({"image": torch.zeros(3, 1, 8, 8)}, 3).shape == (3, 10)


def test_run_without_restoring_goes_on_with_the_next_rows(tmp_path: Path) -> None:
    prepared = digits(tmp_path)
    with killed(batch=7):
        run_alone(prepared.job(LOOP, PARAMS))
    again = run_alone(prepared.job(LOOP, PARAMS, attempt=2))
    assert (again.result.status, again.result.resumed_from_step) == ("finished", 5)
    assert again.printed == [f"epoch {epoch} sizes 64 64 64 64 44" for epoch in (0, 1)], "it counts its own epochs anew"
    assert "is not verified" in again.result.exactness


def test_report_that_one_worker_skips_is_named(tmp_path: Path) -> None:
    job = digits(tmp_path).job("intro_programs.py:one_skips", workers=2)
    with pytest.raises(TrainingError, match=r"report was not called by every worker: rank 0 reports; rank 1 has ended"):
        run_on_two(job)
