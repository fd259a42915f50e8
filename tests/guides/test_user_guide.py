"""Ray Train's user guide, an old release of it: its functions with today's names. The table is in README.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import SpecError, TrainingError
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.events import Reported
from penstock.training.frameworks.ray_train.old_names import refuse_old_names
from tests.guides.running import Prepared, checkpoints, prepare, reports, run_alone, run_on_two

FILE = "user_guide_programs.py"


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    """Most functions of the guide have rows of their own."""
    rng = np.random.default_rng(0)
    a, b = rng.random(96, np.float32), rng.random(96, np.float32)
    tables = {
        split: pa.table({"a": a[rows], "b": b[rows], "label": 2 * a[rows] - b[rows]})
        for split, rows in (("train", slice(0, 76)), ("validation", slice(76, 96)))
    }
    return prepare(tmp_path, tables, label="label")


@pytest.mark.parametrize(("function", "first"), [("ported_by_hand", []), ("ported", ["global batch 16"])])
def test_functions_with_and_without_helpers_share_rows(prepared: Prepared, function: str, first: list[str]) -> None:
    job = prepared.job(f"{FILE}:{function}", workers=2)
    ran = run_on_two(job)
    assert [each.printed for each in ran] == [[*first, "epoch 0 rows 24", "epoch 1 rows 24"]] * 2
    losses = reports(job, "mse")
    assert len(losses) == 2 and losses[1] < losses[0]


def test_config_is_passed_and_returned_values_of_all_workers_kept(prepared: Prepared) -> None:
    for epochs in (2, 5):
        job = prepared.job(f"{FILE}:returns", {"num_epochs": epochs}, run=f"run-{epochs}", workers=2)
        ran = run_on_two(job)
        assert reports(job, "number") == [*range(epochs)]
        assert [*ran[0].result.returned] == [[*range(epochs)]] * 2


def test_reports_of_both_workers_are_charted_and_passed_on(prepared: Prepared) -> None:
    job = prepared.job(f"{FILE}:reports_numbers", workers=2, report={"accuracy": "mean"})
    ran = run_on_two(job)
    assert reports(job, "number") == [0, 1, 2] and reports(job, "accuracy") == [1.0] * 3
    assert reports(job, "workers/1/accuracy") == [1.5] * 3
    results = [
        event.ranks for event in ran[0].events if isinstance(event, Reported)
    ]  # what `penstock.run(on_report=f)` passes to f
    assert [[each["number"] for each in ranks] for ranks in results] == [[0, 0], [1, 1], [2, 2]]
    assert {"report/time_s", "report/iteration", "report/date", "report/node", "report/pid"} <= results[0][0].keys()


def test_metric_of_torchmetrics_is_reported(prepared: Prepared) -> None:
    job = prepared.job(f"{FILE}:measured")
    run_alone(job)
    (accuracy,) = reports(job, "accuracy")
    assert accuracy in [tenths / 10 for tenths in range(11)] or 0 <= accuracy <= 1


def test_two_epochs_then_four_go_on_to_the_weights_of_four(prepared: Prepared) -> None:
    target = f"{FILE}:on_toy_data"
    whole = prepared.job(target, {"num_epochs": 4}, run="whole", workers=2)
    assert [each.printed for each in run_on_two(whole)] == [["begins at 0"]] * 2
    run_on_two(prepared.job(target, {"num_epochs": 2}, run="parts", workers=2))
    more = prepared.job(target, {"num_epochs": 4}, run="parts", attempt=2, workers=2)
    assert [each.printed for each in run_on_two(more)] == [["begins at 2"]] * 2
    ends = [checkpoints(job)[0].manifest for job in (whole, more)]
    assert (ends[0].weights_digest, ends[0].metrics["loss"]) == (ends[1].weights_digest, ends[1].metrics["loss"])
    assert reports(more, "loss") == reports(whole, "loss") and len(reports(whole, "loss")) == 4


@pytest.mark.parametrize(("keep", "kept"), [({"keep": 1, "keep_best": 2}, {1, 2, 3}), ({"keep": 0}, {1, 3})])
def test_two_lowest_losses_are_kept_or_only_the_best(prepared: Prepared, keep: dict[str, int], kept: set[int]) -> None:
    job = prepared.job(f"{FILE}:reports_losses", checkpoint={**keep, "best": {"metric": "loss", "mode": "min"}})
    run_alone(job)
    best = job_checkpoints(job).best()
    assert best is not None and best.manifest.metrics["loss"] == 1
    assert {each.manifest.metrics["loss"] for each in checkpoints(job)} == kept, "the newest, which a run continues from, too"


def test_function_that_never_gives_a_checkpoint_is_refused(prepared: Prepared) -> None:
    with pytest.raises(TrainingError, match="ended without a reported checkpoint"):
        run_alone(prepared.job(f"{FILE}:keeps_nothing"))


def test_features_and_labels_of_two_datasets_train_and_validate(prepared: Prepared) -> None:
    job = prepared.job(f"{FILE}:over_named_columns", {"worker_batch_size": 16, "num_epochs": 20})
    ran = run_alone(job)
    held = reports(job, "held")
    assert ran.result.state.step == 20 * 5 and len(held) == 20 and held[-1] < held[0] / 2


def test_to_torch_gives_features_and_label_in_each_epoch(prepared: Prepared) -> None:
    ran = run_alone(prepared.job(f"{FILE}:by_to_torch", {"worker_batch_size": 50, "num_epochs": 2}))
    assert ran.printed == [f"epoch {epoch} ((50, 2), 50) ((26, 2), 26)" for epoch in (0, 1)]


@pytest.mark.parametrize(("function", "instead"), [("iter_epochs", "once in each epoch")])
def test_calls_that_ray_has_dropped_name_todays(prepared: Prepared, function: str, instead: str) -> None:
    with pytest.raises(SpecError, match=f"has no {function}") as refused:
        run_alone(prepared.job(f"{FILE}:{function}"))
    assert instead in str(refused.value.next_step)


def test_names_of_the_guides_release_are_refused_with_todays(tmp_path: Path) -> None:
    old = {"loop.py": "from ray.air import session\n\ndef train_func(config):\n    session.report({})\n"}
    with pytest.raises(SpecError, match="names of an older Ray") as refused:
        refuse_old_names(old)
    assert "loop.py:1: ray.air.session: today: ray.train.report" in refused.value.problems[0]
