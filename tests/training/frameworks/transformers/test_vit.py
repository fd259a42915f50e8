"""Does the vision transformer of the examples take the same steps on one worker and on two?"""

from __future__ import annotations

import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from penstock.training.frameworks.loops.own_loop import installed
from penstock.training.frameworks.ray_train.framework import RAY_TRAIN
from penstock.training.model import ModelSpec, load_model
from tests import ROOT
from tests.guides.running import checkpoints, killed, prepare, reports, run_alone, run_on_two

if not installed("transformers"):
    pytest.skip('pip install "penstock[transformers]"', allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.drill]

EXAMPLE = ROOT / "examples" / "vit"
SMALL = {"lr": 0.001, "epochs": 2, "batch_size": 64, "layers": 1, "heads": 2, "hidden_size": 16, "patch_size": 8}


def test_vit_takes_equal_steps_on_one_worker_and_two(tmp_path: Path) -> None:
    write = runpy.run_path(str(EXAMPLE / "make_data.py"))["write"]
    write(tmp_path / "made" / "train", 200, 0, 1500, 0)
    write(tmp_path / "made" / "valid", 50, 1500, 1797, 1)
    tables = {split: pq.read_table(tmp_path / "made" / name) for split, name in (("train", "train"), ("validation", "valid"))}
    prepared = prepare(tmp_path, tables, label="label")
    assert str(prepared.manifest.feed_schema["image"]) == "image: uint8[32, 32, 3]"
    datasets = {"valid": "whole"}
    one = prepared.job("loop.py:train_func", SMALL, run="one", base=EXAMPLE)
    two = prepared.job("loop.py:train_func", SMALL, run="two", base=EXAMPLE, workers=2, datasets=datasets)
    run_alone(one)
    run_on_two(two)
    for job in (one, two):
        assert reports(job, "rows_of_a_step") == [64, 64] and reports(job, "steps") == [4, 4]
    image = torch.randint(0, 255, (4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    specs = [
        ModelSpec(code=j.code, params=SMALL, feed_schema=j.manifest.feed_schema, loader=RAY_TRAIN.loader) for j in (one, two)
    ]
    models = [load_model(spec, checkpoints(job)[0].storage) for spec, job in zip(specs, (one, two), strict=True)]
    assert torch.allclose(*(model.predict({"image": image}, 4) for model in models), atol=1e-3)

    cut = prepared.job("loop.py:train_func", SMALL, run="killed", base=EXAMPLE)
    with killed(batch=6):
        run_alone(cut)
    again = run_alone(prepared.job("loop.py:train_func", SMALL, run="killed", base=EXAMPLE, attempt=2))
    assert again.result.resumed_from_step == 4
    assert checkpoints(cut)[0].manifest.weights_digest == checkpoints(one)[0].manifest.weights_digest
