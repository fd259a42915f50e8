"""The guide that distributes a PyTorch training: its three steps. The table is in README.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from penstock.errors import TrainingError
from penstock.ingest.columns.arrays import tensor_array
from penstock.training.frameworks.ray_train.framework import RAY_TRAIN
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, TrainedModel, load_model
from tests.guides.running import Prepared, checkpoints, killed, prepare, reports, run_alone, run_on_two

PARAMS = {"lr": 1e-3, "epochs": 2, "batch_size_per_worker": 32}


def pixels_and_labels(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of 32 by 32 pixels, whose brightness tells the class."""
    rng = np.random.default_rng(0)
    label = np.arange(rows) % 10
    return (label.reshape(-1, 1, 1, 1) * 25 + rng.integers(0, 20, (rows, 32, 32, 3))).astype(np.uint8), label


def pictures(folder: Path) -> Prepared:
    """128 pictures to train on, and 50 held out."""
    image, label = pixels_and_labels(178)
    tables = {
        split: pa.table({"image": tensor_array(image[rows]), "label": label[rows]})
        for split, rows in (("train", slice(0, 128)), ("validation", slice(128, 178)))
    }
    folder.mkdir(exist_ok=True)
    (folder / "cifar_programs.py").write_bytes((Path(__file__).parent / "cifar_programs.py").read_bytes())
    return prepare(folder, tables, [{"map_batches": "cifar_programs.py:to_unit_range"}], label="label")


def model_of(job: TrainJob) -> TrainedModel:
    spec = ModelSpec(code=job.code, params=job.spec.params, feed_schema=job.manifest.feed_schema, loader=RAY_TRAIN.loader)
    return load_model(spec, checkpoints(job)[0].storage)


def test_plain_script_without_a_report_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="ended without a reported checkpoint") as refused:
        run_alone(pictures(tmp_path).job("cifar_programs.py:on_one_machine"))
    assert "ray.train.report" in str(refused.value.next_step)


def test_prepared_torch_loaders_give_each_rank_its_half(tmp_path: Path) -> None:
    job = pictures(tmp_path).job("cifar_programs.py:with_own_loaders", {**PARAMS, "batch_size_per_worker": 16}, workers=2)
    ran = run_on_two(job)
    assert [each.printed for each in ran] == [["epoch 0 rows 32", "epoch 1 rows 32"]] * 2
    assert ran[0].result.status == "finished" and [len(reports(job, name)) for name in ("loss", "accuracy")] == [2, 2]


def test_loaders_made_before_the_epochs_give_every_epoch(tmp_path: Path) -> None:
    prepared = pictures(tmp_path)
    assert str(prepared.manifest.feed_schema["image"]) == "image: float32[3, 32, 32]"
    alone = prepared.job("cifar_programs.py:with_ray_data", PARAMS, run="alone")
    assert run_alone(alone).printed == [f"epoch {epoch} rows 128 batches 4 held 50" for epoch in (0, 1)]
    half = {**PARAMS, "batch_size_per_worker": 16}
    two = prepared.job("cifar_programs.py:with_ray_data", half, run="two", workers=2, datasets={"valid": "whole"})
    ran = run_on_two(two)
    assert [each.printed for each in ran] == [[f"epoch {epoch} rows 64 batches 4 held 50" for epoch in (0, 1)], []]
    assert len(reports(two, "loss")) == len(reports(two, "accuracy")) == 2
    image = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    answers = [model_of(job).predict({"image": image}, 4) for job in (alone, two)]
    assert torch.allclose(*answers, atol=1e-4), "a global batch of 32 in both"


def test_killed_step_three_goes_on_to_the_weights_of_a_whole_run(tmp_path: Path) -> None:
    prepared, params = pictures(tmp_path), {**PARAMS, "epochs": 3, "restores": True}
    whole, parts = (prepared.job("cifar_programs.py:with_ray_data", params, run=run) for run in ("whole", "parts"))
    run_alone(whole)
    with killed(batch=6):
        run_alone(parts)
    assert [each.state.step for each in checkpoints(parts)] == [4]
    again = run_alone(prepared.job("cifar_programs.py:with_ray_data", params, run="parts", attempt=2))
    assert again.printed == [f"epoch {epoch} rows 128 batches 4 held 50" for epoch in (1, 2)]
    ends = [checkpoints(job)[0].manifest for job in (whole, parts)]
    assert (ends[0].weights_digest, ends[0].metrics) == (ends[1].weights_digest, ends[1].metrics)
