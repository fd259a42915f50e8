"""Does a LightningModule go on to the same weights, on two ranks, from the middle and the end of an epoch?"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from penstock.errors import SpecError, TrainingError
from penstock.flows.preflight.try_batch import try_one_batch
from penstock.flows.spec_file import load_spec
from penstock.flows.verbs.init import create_project
from penstock.storage import Storage
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.start_from import find_start
from penstock.training.evaluation.evaluate import evaluate
from penstock.training.frameworks.lightning.framework import LIGHTNING
from penstock.training.frameworks.lightning.library import make_module
from penstock.training.frameworks.lightning.loading import LightningModel
from penstock.training.job import TrainJob
from penstock.training.model import ModelSpec, load_model
from penstock.training.on_ray.worker import RankResult
from penstock.training.ranks import Group
from penstock.training.spec import TrainSpec
from penstock.usercode.capture import capture
from tests import ROOT
from tests.runs.forked import fork_trials_from_here
from tests.training.digits import CPU, ROWS, SCHEMA, ListClient, make_job
from tests.training.ranks import check_continued

MORE_STEPS = "a schedule may depend on the number of steps: 17 before and 33 now"
EVERY = {"every_s": None, "every_steps": 4, "keep": 100, "best": {"metric": "val/loss", "mode": "min"}}


def lightning_job(folder: Path, run: str, attempt: int = 1, module: str = "Digits", **spec: Any) -> TrainJob:
    job = make_job(folder, run=run, attempt=attempt)
    given = {"framework": "lightning", "recipe": f"modules.py:{module}", "epochs": 3, "batch_rows": 32, "workers": 2, **spec}
    code = capture(f"modules.py:{module}", Path(__file__).parent)
    return replace(job, spec=TrainSpec.model_validate({"checkpoint": EVERY, **given}), code=code)


def train(group: Group, jobs: list[TrainJob]) -> list[RankResult]:
    return [LIGHTNING.run_rank(job, group, ListClient()) for job in jobs]


@pytest.mark.drill
def test_resume_from_any_checkpoint_ends_with_same_weights(tmp_path: Path) -> None:
    whole = lightning_job(tmp_path, "whole")
    there = check_continued(whole, train)
    points = {point.step: point.values for point in read_journal(whole.run_storage, 99)}
    assert points[4]["train/rows"] == 4 * 32 and points[33]["train/rows"] == ROWS["train"] - 10 * 32
    assert points[33]["val/rows"] == ROWS["validation"]
    for rank in (0, 1):
        assert 0 < points[33][f"workers/{rank}/data_wait_s"] < points[33][f"workers/{rank}/step_s"]
    spec = ModelSpec(code=whole.code, params={}, feed_schema=SCHEMA, loader=LIGHTNING.loader)
    found = evaluate(whole, load_model(spec, there[0].storage), splits=["validation", "test"])
    assert found.metrics["test/accuracy"] > 0.4, "a guess is right in a tenth"
    # Lightning's sync_dist divides by the mean number of rows of a rank, rounded down: 50 of 101 / 2.
    logged = there[0].manifest.metrics["val/loss"]
    assert found.metrics["val/loss"] == pytest.approx(logged * 50 / 50.5, rel=1e-5)


def alone(job: TrainJob) -> RankResult:
    return LIGHTNING.run_rank(job, Group(0, 1, CPU), ListClient())


def cut_and_continued(folder: Path, module: str) -> tuple[TrainJob, RankResult]:
    """Train to step 17 of 33, the middle of an epoch, then to the end."""
    alone(lightning_job(folder, "cut", module=module, workers=1, max_steps=17))
    rest = lightning_job(folder, "cut", 2, module, workers=1)
    return rest, alone(rest)


def test_module_that_uses_its_trainer_is_tried_resumed_and_loaded(tmp_path: Path) -> None:
    whole = lightning_job(tmp_path, "whole", module="UsesTrainer", workers=1)
    alone(whole)
    rest, ended = cut_and_continued(tmp_path, "UsesTrainer")
    assert (ended.resumed_from_step, ended.state.step) == (17, 33)
    assert ended.exactness == f"same-order: {MORE_STEPS}"
    ends = [job_checkpoints(job).committed()[0] for job in (whole, rest)]
    assert ends[0].manifest.weights_digest == ends[1].manifest.weights_digest
    spec = ModelSpec(code=whole.code, params={}, feed_schema=SCHEMA, loader=LIGHTNING.loader)
    found = evaluate(whole, load_model(spec, ends[0].storage), splits=["validation"])
    assert found.metrics["val/loss"] == pytest.approx(ends[0].manifest.metrics["val/loss"], rel=1e-5)


def test_state_in_no_checkpoint_costs_the_label_and_part_means(tmp_path: Path) -> None:
    rest, ended = cut_and_continued(tmp_path, "Counts")
    assert ended.exactness == f"same-order: seen is in no state_dict, {MORE_STEPS}"
    points = {point.step: point.values for point in read_journal(rest.run_storage, 99)}
    assert "train/mean" not in points[22] and "train/mean" not in points[28], "a mean over a part of the second epoch"
    assert "train/mean" in points[33]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("ThawsOnce", ["layers.1.bias.requires_grad", "layers.1.weight.requires_grad"]),
        ("Lowers", ["_Lowers.count"]),
        ("HalfKept", ["steps"]),
    ],
)
def test_state_that_no_hook_keeps_costs_bit_exactness(tmp_path: Path, module: str, names: list[str]) -> None:
    _, ended = cut_and_continued(tmp_path, module)
    assert ended.exactness == "same-order: " + " is in no state_dict, ".join([*names, MORE_STEPS])


@pytest.mark.parametrize("name", ["val/loss", "val_loss", "loss_of_digits", "accuracy", None])
def test_loss_of_evaluate_is_not_a_returned_accuracy(tmp_path: Path, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_module(lightning_job(tmp_path, "run").code, {})
    batch = {"image": torch.rand(4, 8, 8), "label": torch.arange(4)}

    def validation_step(batch: Any, number: int) -> torch.Tensor:
        returned = torch.tensor(0.25)
        if name is not None:
            module.log(name, 0.25 if name in ("val/loss", "val_loss") else returned)
        return module(batch) if name in ("val/loss", "val_loss") else returned

    monkeypatch.setattr(module, "validation_step", validation_step)
    loss = LightningModel(module.eval(), "modules.py:Digits").loss(batch)
    expected = module.training_step(batch, 0) if name == "accuracy" else torch.tensor(0.25)
    assert torch.equal(loss, expected)


def test_callback_that_averages_weights_is_refused(tmp_path: Path) -> None:
    job = lightning_job(tmp_path, "run", module="Averages", workers=1)
    with pytest.raises(SpecError, match="EMAWeightAveraging validates averages of the weights"):
        alone(job)


def test_loss_that_broadcasts_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="Using a target size") as refused:
        alone(lightning_job(tmp_path, "run", module="Broadcasts", workers=1))
    assert "give both the same shape" in str(refused.value.next_step)


def test_a_module_that_predicts_by_the_label_is_refused(tmp_path: Path) -> None:
    file = create_project(tmp_path / "project", "lightning")[0]
    with (file.parent / "model.py").open("a") as model:
        model.write("\n    def predict_step(self, batch, _):\n        return self(batch) + batch['diagnosis'][:, None]\n")
    loaded = load_spec(file)
    fork_trials_from_here()
    with pytest.raises(TrainingError, match="predicting failed: KeyError: 'diagnosis'") as refused:
        try_one_batch(loaded.project)
    assert refused.value.next_step.startswith("predict without 'diagnosis'")


def test_lightning_page_fits_template_and_names_unread_fields(tmp_path: Path) -> None:
    file = create_project(tmp_path / "project", "lightning")[0]
    page = (ROOT / "docs" / "lightning.md").read_text(encoding="utf-8")
    written = yaml.safe_load(file.read_text()) | yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    file.write_text(yaml.safe_dump(written))
    loaded = load_spec(file)
    project = loaded.project
    assert LIGHTNING.check(project.recipe, loaded.spec.train).can_predict
    ends = page.split("Refused by name:")[1]
    refused: dict[str, Any] = {
        "learning_rate": 0.5,
        "accumulate": 2,
        "compile": True,
        "callbacks": ["ema"],
        "validate_every_steps": 3,
        "last_batch": "drop",
    }
    assert set(ends.split("`")[1::2]) == refused.keys()
    with pytest.raises(SpecError) as told:
        LIGHTNING.check(project.recipe, loaded.spec.train.model_copy(update=refused))
    assert [name for name in refused if f"train.{name}" not in str(told.value)] == []


def test_module_begins_with_the_weights_of_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone(lightning_job(tmp_path, "runs/base", workers=1, max_steps=3))
    jobs = [lightning_job(tmp_path, f"runs/{name}", workers=1, max_steps=1, start_from=name) for name in ("run:base", None)]
    find_start("run:base", tmp_path, Storage(str(tmp_path))).store(jobs[0].run_storage)
    for job in jobs:
        alone(job)
    one, other = (job_checkpoints(job).committed()[0].manifest for job in jobs)
    assert re.search(r"(\d+) of \1 weights are those of run:base\n", capsys.readouterr().out)
    assert one.step == other.step == 1 and one.weights_digest != other.weights_digest


def test_lightning_unread_fields_are_refused_by_name(tmp_path: Path) -> None:
    job = lightning_job(tmp_path, "run", learning_rate=0.5, compile=True)
    with pytest.raises(SpecError, match="does not fit lightning") as refused:
        LIGHTNING.check(job.code, job.spec)
    assert "train.learning_rate" in str(refused.value) and "train.compile" in str(refused.value)
    with pytest.raises(SpecError, match=r"do not fit .*unexpected keyword argument 'hiden'"):
        make_module(job.code, {"hiden": 3})
