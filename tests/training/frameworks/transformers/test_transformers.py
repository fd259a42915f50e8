"""Does a Hugging Face model go on to the same weights, on two ranks, from the middle and the end of an epoch?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import SpecError, TrainingError
from penstock.storage import Storage
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.start_from import find_start
from penstock.training.evaluation.evaluate import evaluate
from penstock.training.frameworks.transformers.framework import TRANSFORMERS
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, load_model
from penstock.training.on_ray.worker import RankResult
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture
from tests.training.digits import ROWS, SCHEMA, ListClient, make_job
from tests.training.ranks import check_continued

transformers = pytest.importorskip("transformers", reason='pip install "penstock[transformers]"; `make frameworks` does')

EVERY = {"every_s": None, "every_steps": 4, "keep": 100, "best": {"metric": "val/accuracy", "mode": "max"}}
PARAMS = {"hidden_size": 32, "learning_rate": 0.02, "warmup_steps": 2}


def hf_job(folder: Path, run: str, target: str = "Vision", attempt: int = 1, **spec: Any) -> TrainJob:
    job = make_job(folder, run=run, attempt=attempt)
    given = {"framework": "transformers", "recipe": f"hf_models.py:{target}", "params": PARAMS, "epochs": 3, "batch_rows": 32}
    code = capture(given["recipe"], Path(__file__).parent)
    return replace(job, spec=TrainSpec.model_validate({"checkpoint": EVERY, "workers": 2, **given, **spec}), code=code)


def train(group: Group, jobs: list[TrainJob]) -> list[RankResult]:
    return [TRANSFORMERS.run_rank(job, group, ListClient()) for job in jobs]


@pytest.mark.slow
def test_resume_from_any_checkpoint_ends_with_same_weights(tmp_path: Path) -> None:
    whole = hf_job(tmp_path, "whole")
    there = check_continued(whole, train)
    logged_rows = [point.values["train/rows"] for point in read_journal(whole.run_storage, 33)]
    assert sum(logged_rows) == 3 * ROWS["train"], "what penstock.log is given, over both ranks and the steps between reports"
    spec = ModelSpec(code=whole.code, params=PARAMS, feed_schema=SCHEMA, loader=TRANSFORMERS.loader)
    found = evaluate(whole, load_model(spec, there[0].storage), splits=["validation", "test"])
    assert found.metrics["test/accuracy"] > 0.25, "a guess is right in a tenth"
    logged = there[0].manifest.metrics
    assert found.metrics["val/loss"] == pytest.approx(logged["val/loss"], rel=1e-5)
    assert found.metrics["val/accuracy"] == pytest.approx(logged["val/accuracy"])
    folder = there[0].storage.local_path(".")
    assert {"model.safetensors", "config.json"} <= {file.name for file in folder.iterdir()}
    theirs = transformers.ViTForImageClassification.from_pretrained(folder, local_files_only=True)
    assert theirs(torch.zeros(2, 1, 8, 8)).logits.shape == (2, 10)


def test_single_rank_continues_when_epochs_are_added(tmp_path: Path) -> None:
    alone = Group(0, 1, torch.device("cpu"))
    (first,) = train(alone, [hf_job(tmp_path, "run", workers=1, epochs=1, checkpoint={"every_s": None})])
    (second,) = train(alone, [hf_job(tmp_path, "run", workers=1, epochs=2, attempt=2)])
    assert (first.state.step, second.resumed_from_step, second.state.step) == (11, 11, 22)
    assert second.exactness.endswith(", the schedule depends on the number of steps: 11 before and 22 now")
    constant = {**PARAMS, "lr_scheduler_type": "constant"}
    del constant["warmup_steps"]
    for target, names in {"Counts": ["trainer.seen"], "Lowered": ["Lowers.count", "recipe.calls"], "Vision": []}.items():
        own = {"workers": 1, "params": constant, "target": target}
        train(alone, [hf_job(tmp_path, target, epochs=1, **own)])
        (counted,) = train(alone, [hf_job(tmp_path, target, epochs=2, attempt=2, **own)])
        reasons = ", ".join(f"{name} is in no state_dict" for name in names)
        assert counted.exactness == (f"same-order: {reasons}" if reasons else "bit-exact")


def test_model_begins_with_the_weights_of_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = Group(0, 1, torch.device("cpu"))
    train(alone, [hf_job(tmp_path, "runs/base", workers=1, max_steps=3)])
    jobs = [hf_job(tmp_path, f"runs/{name}", workers=1, max_steps=1, start_from=name) for name in ("run:base", None)]
    find_start("run:base", tmp_path, Storage(str(tmp_path))).store(jobs[0].run_storage)
    train(alone, jobs)
    assert re.search(r"(\d+) of \1 weights are those of run:base\n", capsys.readouterr().out)
    one, other = (job_checkpoints(job).committed()[0].manifest for job in jobs)
    assert one.step == other.step == 1 and one.weights_digest != other.weights_digest


def test_model_without_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"ViTForImageClassification takes none of the columns 'image'\n.*pixel_values"):
        train(Group(0, 1, torch.device("cpu")), [hf_job(tmp_path, "run", target="vision", workers=1)])


def test_params_are_sorted_by_name_and_unread_ones_refused(tmp_path: Path) -> None:
    params = {"hidden": 8, "per_device_train_batch_size": 4, "learning_rat": 0.1, "logging_dir": "x"}
    job = hf_job(tmp_path, "run", target="vision", params=params)
    with pytest.raises(SpecError, match="does not fit transformers") as refused:
        TRANSFORMERS.check(job.code, job.spec)
    told = str(refused.value)
    assert "did you mean 'hidden_size'?" in told and "per_device_train_batch_size is set by the pipeline" in told
    assert "did you mean 'learning_rate'?" in told
    job = hf_job(tmp_path, "run", learning_rate=0.5, clip_norm=1.0)
    with pytest.raises(SpecError, match="does not fit transformers") as refused:
        TRANSFORMERS.check(job.code, job.spec)
    assert "params.learning_rate" in str(refused.value) and "params.max_grad_norm" in str(refused.value)
