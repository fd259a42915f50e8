"""Does one rank train to the same bits however often it is stopped, and tell what it did? In this process, without Ray."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CheckpointError, ResumeError, SpecError, TrainingError
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import SampleSpec, ShuffleSpec
from penstock.storage import Storage
from penstock.training.checkpoint.journal import read_journal
from penstock.training.checkpoint.manifest import CheckpointManifest
from penstock.training.checkpoint.state_files import weights_of
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.events import CheckpointCommitted, Point, Resumed, TrainProgress, Warned
from penstock.training.on_ray.worker import run_rank
from penstock.training.ranks import Group
from tests.training.digits import CPU, ROWS, ListClient, make_job, train_alone

STEPS = 14  # two epochs of 333 rows in batches of 48


def newest(folder: Path, run: str) -> CheckpointManifest:
    checkpoint, warnings = CheckpointStore(Storage(str(folder / run))).newest_valid()
    assert checkpoint is not None and not warnings
    return checkpoint.manifest


def points(client: ListClient) -> list[Point]:
    return [event for event in client.events if isinstance(event, Point)]


def recorded(folder: Path, run: str, attempt: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / run / "rows" / f"{attempt}-0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "recipe, spec",
    [
        ("Digits", {}),
        ("Scheduled", {"clip_norm": 0.5, "accumulate": 3}),
        ("Digits", {"precision": "bf16"}),
        ("Digits", {"precision": "fp16"}),
        ("MixedDtypes", {}),
        pytest.param("Digits", {"compile": True}, marks=pytest.mark.drill),
    ],
)
def test_two_stops_change_no_weights(tmp_path: Path, recipe: str, spec: dict[str, Any]) -> None:
    train_alone(make_job(tmp_path, run="whole", recipe=recipe, **spec))
    for attempt, max_steps in enumerate([3, 9, None], start=1):
        train_alone(make_job(tmp_path, run="parts", recipe=recipe, attempt=attempt, max_steps=max_steps, **spec))
    whole, parts = newest(tmp_path, "whole"), newest(tmp_path, "parts")
    assert whole.step == parts.step == STEPS
    assert whole.weights_digest == parts.weights_digest
    assert whole.metrics == parts.metrics
    assert parts.exactness == "bit-exact"


def test_sampled_epoch_ends_and_continues_exactly(tmp_path: Path) -> None:
    more: dict[str, Any] = {"recipe": "Scheduled", "sample": SampleSpec(balance="label", rows=500), "workers": 1}
    whole = make_job(tmp_path, run="whole", **more)
    assert whole.total_steps == 2 * 11  # of 48 rows
    train_alone(whole)
    for attempt, max_steps in enumerate([3, 15, None], start=1):
        train_alone(make_job(tmp_path, run="parts", attempt=attempt, max_steps=max_steps, **more))
    assert newest(tmp_path, "whole").step == newest(tmp_path, "parts").step == 22
    assert newest(tmp_path, "whole").weights_digest == newest(tmp_path, "parts").weights_digest
    rows = [record["rows"] for record in recorded(tmp_path, "whole", 1)]
    assert [len(batch) for batch in rows] == 2 * [*[48] * 10, 20]


@pytest.mark.parametrize(("last", "steps"), [("drop", 10), ("fill", 11)])
def test_the_last_step_of_an_epoch_is_dropped_or_filled(tmp_path: Path, last: str, steps: int) -> None:
    more: dict[str, Any] = {"sample": SampleSpec(balance="label", rows=500), "workers": 1, "last_batch": last}
    job = make_job(tmp_path, run="run", **more)
    assert job.total_steps == 2 * steps
    train_alone(job)
    assert [len(record["rows"]) for record in recorded(tmp_path, "run", 1)] == [48] * 2 * steps
    assert newest(tmp_path, "run").step == 2 * steps


def test_digest_notices_a_forgotten_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_alone(make_job(tmp_path, run="whole"))
    monkeypatch.setattr("penstock.training.on_ray.worker.restore_rng", lambda state, device: None)
    train_alone(make_job(tmp_path, run="parts", max_steps=3))
    train_alone(make_job(tmp_path, run="parts", attempt=2))
    assert newest(tmp_path, "whole").weights_digest != newest(tmp_path, "parts").weights_digest


def test_validation_and_save_cadence_change_no_weights(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, run="seldom"))
    often = make_job(tmp_path, run="often", validate_every_steps=2, checkpoint={"every_steps": 1, "every_s": 0.001})
    train_alone(often)
    assert newest(tmp_path, "seldom").weights_digest == newest(tmp_path, "often").weights_digest


def test_more_epochs_later_continue_the_finished_run(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, run="at-once", epochs=3))
    train_alone(make_job(tmp_path, run="later", epochs=2))
    train_alone(make_job(tmp_path, run="later", epochs=3, attempt=2))
    assert newest(tmp_path, "at-once").weights_digest == newest(tmp_path, "later").weights_digest


def test_finished_run_does_nothing_again(tmp_path: Path) -> None:
    first = train_alone(make_job(tmp_path))
    client = ListClient()
    again = train_alone(make_job(tmp_path, attempt=2), client)
    assert again.status == "finished" and again.checkpoint == first.checkpoint
    assert again.resumed_from_step == STEPS
    assert points(client) == []
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2  # one per epoch


def test_stop_saves_at_next_step_and_next_attempt_continues(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, run="whole"))
    client = ListClient(stop_after_step=1)
    spec: dict[str, Any] = {"recipe": "Slow", "params": {"seconds": 0.1}}
    stopped = train_alone(make_job(tmp_path, run="stopped", **spec), client)
    assert stopped.status == "interrupted" and 1 <= stopped.state.step < STEPS
    assert newest(tmp_path, "stopped").step == stopped.state.step
    client = ListClient()
    ended = train_alone(make_job(tmp_path, run="stopped", attempt=2, **spec), client)
    assert ended.status == "finished" and ended.resumed_from_step == stopped.state.step
    assert newest(tmp_path, "whole").weights_digest == newest(tmp_path, "stopped").weights_digest
    resumed = [event for event in client.events if isinstance(event, Resumed)]
    assert [(event.step, event.exactness) for event in resumed] == [(stopped.state.step, "bit-exact")]


def test_loss_without_gradient_is_a_recipe_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"Detached: loss\(\) returned a tensor that does not depend on the model's param"):
        train_alone(make_job(tmp_path, recipe="Detached"))


def test_a_stop_before_the_first_step_writes_nothing(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    result = run_rank(job, Group(0, 1, CPU), ListClient(), stop=True)
    assert (result.status, result.state.step, result.checkpoint) == ("interrupted", 0, None)


def test_rows_are_learned_once_per_epoch_across_a_stop(tmp_path: Path) -> None:
    for attempt, max_steps in enumerate([3, 9, None], start=1):
        train_alone(make_job(tmp_path, attempt=attempt, max_steps=max_steps))
    steps = [record for attempt in (1, 2, 3) for record in recorded(tmp_path, "run", attempt)]
    assert [record["step"] for record in steps] == list(range(STEPS))
    order = make_job(tmp_path).order
    for epoch in (0, 1):
        rows = [row for record in steps if record["epoch"] == epoch for row in record["rows"]]
        assert rows == order.ids(epoch, 0, ROWS["train"]).tolist()


def test_every_step_has_one_point_and_the_journal_holds_them_all(tmp_path: Path) -> None:
    client = ListClient()
    train_alone(make_job(tmp_path), client)
    losses = {point.step: point.values["train/loss"] for point in points(client) if "train/loss" in point.values}
    assert list(losses) == list(range(1, STEPS + 1)) and all(math.isfinite(loss) for loss in losses.values())
    names = {name for point in points(client) for name in point.values}
    assert names == {
        *("train/loss", "train/lr", "train/rows_per_s", "train/step_s", "train/data_wait_s", "train/epoch"),
        *("val/loss", "val/accuracy", "val/f1"),
    }
    assert [point.step for point in points(client) if "val/loss" in point.values] == [7, STEPS]
    sealed = {
        (p.step, name): (p.t_ms, p.values[name])
        for p in read_journal(Storage(str(tmp_path / "run")), STEPS)
        for name in p.values
    }
    sent = {(p.step, name): (p.t_ms, p.values[name]) for p in points(client) for name in p.values}
    assert sealed == sent
    progress = [event for event in client.events if isinstance(event, TrainProgress)]
    assert progress[-1].step == progress[-1].total_steps == STEPS


def test_repeated_steps_have_points_once(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, max_steps=9, checkpoint={"every_steps": 3, "every_s": None}))
    store = CheckpointStore(Storage(str(tmp_path / "run")))
    newest_one = store.committed()[0]
    newest_one.storage.delete("model.safetensors")
    client = ListClient()
    train_alone(make_job(tmp_path, attempt=2), client)
    sealed = [p.step for p in read_journal(Storage(str(tmp_path / "run")), STEPS) if "train/loss" in p.values]
    assert sealed == list(range(1, STEPS + 1))


def test_damaged_checkpoint_costs_steps_and_no_bits(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, run="whole"))
    train_alone(make_job(tmp_path, max_steps=9, checkpoint={"every_steps": 4, "every_s": None}))
    store = CheckpointStore(Storage(str(tmp_path / "run")))
    torn = store.committed()[0]
    model = tmp_path / "run" / "checkpoints" / torn.name / "model.safetensors"
    model.write_bytes(model.read_bytes()[:100])
    client = ListClient()
    result = train_alone(make_job(tmp_path, attempt=2), client)
    assert result.resumed_from_step == 8
    (resumed,) = [event for event in client.events if isinstance(event, Resumed)]
    assert "model.safetensors has 100 bytes" in resumed.warnings[0] and "1 step is trained again" in resumed.warnings[0]
    assert newest(tmp_path, "run").weights_digest == newest(tmp_path, "whole").weights_digest


def test_time_based_checkpoints_need_no_step_count(tmp_path: Path) -> None:
    client = ListClient()
    slow: dict[str, Any] = {"recipe": "Slow", "params": {"seconds": 0.06}}
    spec = {"every_s": 0.05, "every_epoch": False, "keep": 20}
    train_alone(make_job(tmp_path, checkpoint=spec, **slow), client)
    steps = [event.step for event in client.events if isinstance(event, CheckpointCommitted)]
    assert len(steps) > 2 and steps[-1] == STEPS


def test_the_end_is_saved_even_if_nothing_asks_for_it(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, checkpoint={"every_s": None, "every_epoch": False}, max_steps=4))
    assert [c.manifest.step for c in CheckpointStore(Storage(str(tmp_path / "run"))).committed()] == [4]


def test_changed_rate_in_params_is_applied_with_warning(tmp_path: Path) -> None:
    def rates(run: str, **more: Any) -> dict[int, float]:
        client = ListClient()
        train_alone(make_job(tmp_path, run=run, recipe="Scheduled", max_steps=6, **more), client)
        for event in client.events:
            if isinstance(event, Resumed):
                assert event.exactness.endswith(", train.params (rate)")
                assert event.warnings == ("from step 3 on the optimizer has new settings: lr 0.05 -> 0.01",)
        return {point.step: point.values["train/lr"] for point in points(client) if "train/lr" in point.values}

    train_alone(make_job(tmp_path, run="changed", recipe="Scheduled", max_steps=3, params={"rate": 0.05}))
    changed, whole = (rates(run, attempt=2, params={"rate": 0.01}) for run in ("changed", "whole"))
    assert changed == {step: whole[step] for step in (4, 5, 6)}


def test_changed_learning_rate_is_applied_with_warning(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, max_steps=3, learning_rate=1e-2))
    client = ListClient()
    result = train_alone(make_job(tmp_path, attempt=2, learning_rate=1e-3), client)
    assert result.exactness == "same-order: optimizer (lr), train.learning_rate 0.01 -> 0.001"
    told = next(event.warnings for event in client.events if isinstance(event, Resumed))
    assert told == ("from step 3 on the optimizer has new settings: lr 0.01 -> 0.001",)
    rates = {point.values["train/lr"] for point in points(client) if "train/lr" in point.values}
    assert len(rates) == 1 and rates.pop() == pytest.approx(1e-3)
    third = train_alone(make_job(tmp_path, attempt=3, epochs=3, learning_rate=1e-3))
    assert third.exactness == result.exactness, "what an earlier attempt changed is not forgotten"


def test_changed_recipe_names_the_changed_file(tmp_path: Path) -> None:
    job = make_job(tmp_path, max_steps=3)
    train_alone(job)
    code = job.code.model_copy(update={"reached": {**job.code.reached, "words.txt": "other"}})
    result = train_alone(replace(job, code=code, attempt=2))
    assert result.exactness == "same-order: the recipe's code (words.txt)"


def test_nondeterministic_op_warns_once_and_is_recorded(tmp_path: Path) -> None:
    client = ListClient()
    reason = "same-order: put_ is not deterministic"
    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation") as shown:
        first = train_alone(make_job(tmp_path, recipe="Chance", max_steps=3), client)
    assert len([warning for warning in shown if "put_" in str(warning.message)]) == 1
    assert first.exactness == newest(tmp_path, "run").exactness == reason
    told = [event.message for event in client.events if isinstance(event, Warned)]
    assert told == ["torch has no deterministic put_ for this device: weights may differ in their last bits"]
    with pytest.warns(UserWarning, match="put_"):
        again = train_alone(make_job(tmp_path, recipe="Chance", attempt=2), client)
    assert again.exactness == reason and again.resumed_from_step == 3
    assert len([event for event in client.events if isinstance(event, Warned)]) == 1


def test_nondeterminism_in_validation_keeps_bit_exact(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="put_"):
        result = train_alone(make_job(tmp_path, recipe="ChanceInPredict"))
    assert result.exactness == "bit-exact"


def test_other_data_are_refused(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, max_steps=3))
    other = make_order(ShuffleSpec(seed=18), ROWS["train"])
    job = make_job(tmp_path, attempt=2)
    job = replace(job, order=other, identity={**job.identity, "order": other.fingerprint})
    with pytest.raises(ResumeError, match="another training") as caught:
        train_alone(job)
    assert caught.value.problems[0].startswith("order: ") and "--fresh" in str(caught.value)


def test_another_model_is_refused(tmp_path: Path) -> None:
    train_alone(make_job(tmp_path, max_steps=3))
    with pytest.raises(ResumeError, match="does not fit the recipe's model"):
        train_alone(make_job(tmp_path, attempt=2, params={"hidden": 33}))


def test_failed_checkpoint_stops_training(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        train_alone(job)


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    client = ListClient()
    best = {"metric": "val/loss", "mode": "min"}
    train_alone(make_job(tmp_path, epochs=4, checkpoint={"every_s": None, "keep": 1, "best": best}), client)
    points = [event for event in client.events if isinstance(event, Point)]
    measured = [(point.values["val/loss"], point.step) for point in points if "val/loss" in point.values]
    rules = make_job(tmp_path, checkpoint={"keep": 1, "best": best}).spec.checkpoint
    kept = CheckpointStore(Storage(str(tmp_path / "run")), rules).best()
    assert kept is not None and kept.manifest.step == min(measured)[1]


def test_unmeasured_best_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="val/acuracy") as caught:
        train_alone(make_job(tmp_path, checkpoint={"best": {"metric": "val/acuracy"}}))
    assert "val/accuracy" in str(caught.value)


def test_recipe_bug_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"loss\(\) failed: ValueError: this recipe is broken .*recipes\.py:\d+ in loss"):
        train_alone(make_job(tmp_path, recipe="Broken"))


def test_recipe_with_only_a_loss_trains_and_validates(tmp_path: Path) -> None:
    client = ListClient()
    train_alone(make_job(tmp_path, recipe="OnlyLoss"), client)
    assert {name for point in points(client) for name in point.values if name.startswith("val/")} == {"val/loss"}


def test_nan_loss_ends_training_and_saves_nothing_later(tmp_path: Path) -> None:
    job = make_job(tmp_path, recipe="OnlyLoss", learning_rate=1e37, checkpoint={"every_steps": 1})
    with pytest.raises(TrainingError, match=r"(the training loss is|the weight .* is not a number) .*nothing was saved"):
        train_alone(job)
    for checkpoint in CheckpointStore(job.run_storage).committed():
        assert checkpoint.manifest.metrics["train/loss"] is not None
        assert not any(tensor.isnan().any() for tensor in weights_of(checkpoint.storage).values())


def test_first_step_imports_only_needed_libraries(tmp_path: Path) -> None:
    """torchmetrics brings matplotlib: half a second before the first step of every worker."""
    script = """
import sys
import penstock.training.loop.loop
print("ray" in sys.modules)  # what forks workers imports it: Ray reads a worker's settings when it is imported
from pathlib import Path
from tests.training.digits import make_job, train_alone
folder = Path(sys.argv[1])
result = train_alone(make_job(folder, recipe="Modules", epochs=1, params={"file": str(folder / "modules")}))
print(result.status, "torchmetrics" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "finished", "True"]
    loaded = set((tmp_path / "modules").read_text().split())
    assert "torch" in loaded and not loaded & {"torchmetrics", "mlflow", "prefect"}
