"""What do one, two and four ranks have in common? The rows of every batch, metrics, the mean gradient, an exact resume."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import PenstockError
from penstock.storage import Storage
from penstock.training.checkpoint import exactness, state_files, store
from penstock.training.checkpoint.manifest import Checkpoint, CheckpointFacts
from penstock.training.checkpoint.packed import pack
from penstock.training.checkpoint.state_files import torch_snapshot, training_file, weights_of
from penstock.training.checkpoint.store import CheckpointStore, Snapshot
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.job import TrainJob
from penstock.training.on_ray.worker import RankResult, run_rank
from penstock.training.ranks import Group
from penstock.training.recipe import Recipe
from penstock.training.step.gradients import MeanGradients
from tests.training.digits import ListClient, make_job
from tests.training.ranks import run_ranks, train_all, train_ranks


def newest(folder: Path, run: str) -> Checkpoint:
    checkpoint, _ = CheckpointStore(Storage(str(folder / run))).newest_valid()
    assert checkpoint is not None
    return checkpoint


def global_batches(folder: Path, run: str) -> dict[int, list[int]]:
    """Step to the rows of its global batch, put together from the ranks' records."""
    parts: dict[int, list[tuple[int, list[int]]]] = {}
    for file in (folder / run / "rows").glob("*.jsonl"):
        for record in map(json.loads, file.read_text().splitlines()):
            parts.setdefault(record["step"], []).append((record["first_row"], record["rows"]))
    return {step: [row for _, rows in sorted(found) for row in rows] for step, found in sorted(parts.items())}


def write_what_the_other_rank_never_sends(group: Group, folder: Path) -> str:
    if not group.is_first:
        return ""
    storage = Storage(str(folder))
    writer = CheckpointWriter(CheckpointStore(storage), storage, lambda event: None)
    gathered = group.gather(torch.zeros(3, dtype=torch.uint8))
    facts = CheckpointFacts(step=1, epoch=0, position=0, world_size=2)

    def completed() -> Snapshot:
        return torch_snapshot(facts, {}, training_file(pack({}), gathered()))

    writer.submit(completed, [])
    try:
        writer.wait()
    except RuntimeError as error:
        return type(error).__name__ + str(storage.list("checkpoints"))
    finally:
        writer.close()
    return "written"


def test_lost_rank_is_not_a_write_error(tmp_path: Path) -> None:
    # A CheckpointError would end the run: what a lost worker raises is tried again.
    assert run_ranks(write_what_the_other_rank_never_sends, 2, tmp_path)[0] == "RuntimeError[]"


def write_where_this_rank_cannot(group: Group, job: TrainJob) -> str:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    if group.is_first:
        state_files.safetensors.torch.save_file = full  # type: ignore[assignment]
    return error_of(group, job)


def error_of(group: Group, job: TrainJob) -> str:
    try:
        run_rank(job, group, ListClient())
    except (PenstockError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


def test_failed_write_ends_training_and_leaves_nothing(tmp_path: Path) -> None:
    told = run_ranks(write_where_this_rank_cannot, 2, make_job(tmp_path, workers=2, checkpoint={"every_steps": 2}))
    assert told[0].startswith("CheckpointError: cannot write checkpoint") and "no space left" in told[0]
    assert Storage(str(tmp_path / "run")).list("checkpoints") == []


def test_nan_weights_on_two_ranks_leave_nothing(tmp_path: Path) -> None:
    job = make_job(tmp_path, workers=2, recipe="NanWeights", checkpoint={"every_s": None, "every_steps": 4})
    told = run_ranks(error_of, 2, job)
    # The next step's loss may be looked at before the weights are.
    assert re.match(r"TrainingError: (the weight .* is not a number after step 4|the training loss is nan at step 5)", told[0])
    assert Storage(str(tmp_path / "run")).list("checkpoints") == []


def test_extra_state_of_modules_is_rank_0s(tmp_path: Path) -> None:
    # Each rank counts its own rows: 83 are divided unevenly, so another rank's count would change the average.
    spec = {"recipe": "Counting", "workers": 2, "batch_rows": 83}
    whole = make_job(tmp_path, run="whole", **spec)
    parts = [
        make_job(tmp_path, run="parts", attempt=attempt, max_steps=steps, **spec) for attempt, steps in ((1, 3), (2, None))
    ]
    train_ranks(whole, *parts)
    assert newest(tmp_path, "whole").manifest.weights_digest == newest(tmp_path, "parts").manifest.weights_digest


SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of each size, in one group: `rows-`, `clipped-`, and `frozen-`, whose weights stay as they are."""
    folder = tmp_path_factory.mktemp("trained")
    for workers in SIZES:
        own = {"recipe": "Linear", "workers": workers}
        train_ranks(
            # 333 rows in batches of 83: parts of unequal length, and a last batch of one row, which leaves ranks without any.
            make_job(folder, run=f"rows-{workers}", batch_rows=83, **own),
            make_job(folder, run=f"clipped-{workers}", batch_rows=83, clip_norm=1.0, accumulate=min(workers, 2), **own),
            make_job(folder, run=f"frozen-{workers}", learning_rate=1e-30, max_steps=1, **own),
        )
    return folder


def test_global_batches_do_not_depend_on_world_size(trained: Path) -> None:
    alone = global_batches(trained, "rows-1")
    assert [len(rows) for rows in alone.values()] == [83, 83, 83, 83, 1] * 2
    assert global_batches(trained, "rows-2") == alone
    assert global_batches(trained, "rows-4") == alone


def test_other_world_size_keeps_rows_and_is_same_order(tmp_path: Path) -> None:
    train_ranks(make_job(tmp_path, run="whole"))
    sizes = [(1, 3), (4, 7), (2, None)]
    for attempt, (workers, max_steps) in enumerate(sizes, start=1):
        job = make_job(tmp_path, run="resized", workers=workers, max_steps=max_steps, attempt=attempt)
        (result,) = train_ranks(job)
    assert result.exactness == "same-order: workers 1 -> 4, workers 4 -> 2"
    assert global_batches(tmp_path, "resized") == global_batches(tmp_path, "whole")


@pytest.mark.parametrize("workers", [2, 4])
def test_the_gradient_is_the_mean_over_the_global_batch(trained: Path, workers: int) -> None:
    alone, together = newest(trained, "clipped-1"), newest(trained, f"clipped-{workers}")
    for name, weight in weights_of(alone.storage).items():
        torch.testing.assert_close(weights_of(together.storage)[name], weight, rtol=1e-4, atol=1e-5)
    assert together.manifest.metrics == pytest.approx(alone.manifest.metrics, rel=1e-4)


def test_validation_counts_each_row_once_on_any_ranks(trained: Path) -> None:
    measured = [newest(trained, f"frozen-{workers}").manifest.metrics for workers in SIZES]
    assert measured[0]["val/accuracy"] == measured[1]["val/accuracy"] == measured[2]["val/accuracy"]
    assert measured[0]["val/f1"] == pytest.approx(measured[2]["val/f1"], rel=1e-6)
    assert measured[0]["val/loss"] == pytest.approx(measured[2]["val/loss"], rel=1e-6)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.drill)])
def test_two_stops_of_a_group_change_no_weights(tmp_path: Path, workers: int) -> None:
    spec = {"recipe": "Scheduled", "workers": workers, "params": {"hidden": 600}}
    whole = make_job(tmp_path, run="whole", **spec)
    parts = [
        make_job(tmp_path, run="parts", attempt=attempt, max_steps=max_steps, **spec)
        for attempt, max_steps in enumerate([3, 9, None], start=1)
    ]
    results = train_ranks(whole, *parts)
    assert [result.resumed_from_step for result in results] == [None, None, 3, 9]
    assert {result.exactness for result in results} == {"bit-exact"}
    assert newest(tmp_path, "whole").manifest.weights_digest == newest(tmp_path, "parts").manifest.weights_digest


@pytest.mark.drill
def test_ddp_buckets_do_not_depend_on_the_first_batch(tmp_path: Path) -> None:
    """Why training begins with a backward of zeros. If this fails, DDP has changed and it may go."""
    spec = {"recipe": "Scheduled", "workers": 4, "params": {"hidden": 600}}
    jobs = (
        make_job(tmp_path, run="whole", **spec),
        make_job(tmp_path, run="parts", max_steps=3, **spec),
        make_job(tmp_path, run="parts", attempt=2, **spec),
    )
    run_ranks(_train_by_ddp_alone, 4, jobs)
    assert newest(tmp_path, "whole").manifest.weights_digest != newest(tmp_path, "parts").manifest.weights_digest


def _train_by_ddp_alone(group: Group, jobs: tuple[TrainJob, ...]) -> list[RankResult]:
    MeanGradients._settle = lambda self: None  # type: ignore[method-assign]
    return train_all(group, jobs)


@pytest.mark.parametrize(
    ("recipe", "accumulate", "workers"), [pytest.param("Branches", 1, 4, marks=pytest.mark.drill), ("Branches", 3, 2)]
)
def test_parameters_unused_on_some_ranks_or_steps_train(tmp_path: Path, recipe: str, accumulate: int, workers: int) -> None:
    # Batches of 10 rows: half of them hold no label 3, and of 4 ranks some hold none in most steps. The last has 3 rows.
    spec = {"recipe": recipe, "batch_rows": 10, "accumulate": accumulate}
    train_ranks(make_job(tmp_path, run="alone", recipe=recipe, batch_rows=10))
    together = {**spec, "workers": workers}
    train_ranks(
        make_job(tmp_path, run="together", **together),
        make_job(tmp_path, run="parts", max_steps=21, **together),
        make_job(tmp_path, run="parts", attempt=2, **together),
    )
    alone, whole = newest(tmp_path, "alone"), newest(tmp_path, "together")
    for name, weight in weights_of(alone.storage).items():
        torch.testing.assert_close(weights_of(whole.storage)[name], weight, rtol=1e-4, atol=1e-5)
    assert newest(tmp_path, "parts").manifest.weights_digest == whole.manifest.weights_digest


def test_sparse_embedding_is_refused_on_several_ranks(tmp_path: Path) -> None:
    errors = run_ranks(error_of, 2, make_job(tmp_path, recipe="Sparse", workers=2, max_steps=2))
    assert all("Embedding 'table' has sparse=True" in error for error in errors), errors


def test_recipe_may_freeze_parameters_during_training(tmp_path: Path) -> None:
    spec = {"recipe": "Freezing", "batch_rows": 10}
    train_ranks(make_job(tmp_path, run="alone", **spec))
    train_ranks(make_job(tmp_path, run="together", workers=2, **spec))
    train_ranks(make_job(tmp_path, run="unfrozen", workers=2, recipe="Branches", batch_rows=10))
    alone, together = weights_of(newest(tmp_path, "alone").storage), weights_of(newest(tmp_path, "together").storage)
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        weights_of(newest(tmp_path, "unfrozen").storage)["even.weight"], together["even.weight"], rtol=1e-2
    )


def test_part_thawed_in_training_is_refused_on_two_ranks(tmp_path: Path) -> None:
    errors = run_ranks(error_of, 2, make_job(tmp_path, recipe="Thawing", workers=2))
    assert all("even.weight was frozen when training began and is not any more" in error for error in errors), errors


def test_group_continues_with_ranks_without_rows(tmp_path: Path) -> None:
    spec = {"recipe": "Linear", "batch_rows": 83, "workers": 4, "precision": "fp16"}  # the fifth batch has one row
    parts = [
        make_job(tmp_path, run="parts", attempt=attempt, max_steps=max_steps, **spec)
        for attempt, max_steps in ((1, 4), (2, None))
    ]
    results = train_ranks(make_job(tmp_path, run="whole", **spec), *parts)
    assert [result.resumed_from_step for result in results] == [None, None, 4]
    assert newest(tmp_path, "whole").manifest.weights_digest == newest(tmp_path, "parts").manifest.weights_digest


def train_on_a_slow_store(group: Group, job: TrainJob, again: TrainJob, slow_s: float) -> list[RankResult]:
    """Rank 0 writes and hashes each checkpoint for longer than a collective may take."""
    digest_of_file = store.file_digest

    def slowly(file: Any) -> str:
        if group.is_first:
            time.sleep(slow_s)  # stands for a hundred gigabytes
        return digest_of_file(file)

    store.file_digest = slowly
    results = [group.together(lambda job=job: run_rank(job, group, ListClient())) for job in (job, again)]  # type: ignore[misc]
    return results


@pytest.mark.drill
@pytest.mark.slow
def test_no_collective_waits_for_the_store(tmp_path: Path) -> None:
    every = {"every_s": None, "every_steps": 1, "every_epoch": False}
    job, again = (make_job(tmp_path, workers=2, max_steps=steps, attempt=steps - 1, checkpoint=every) for steps in (2, 3))
    first, second = run_ranks(train_on_a_slow_store, 2, job, again, 4.0, timeout_s=6.0)[0]
    assert (first.status, second.resumed_from_step, second.state.step) == ("finished", 2, 3)


def fail_on_rank_1(group: Group) -> str:
    def work() -> None:
        if group.rank == 1:
            raise OSError("the disk is gone")

    try:
        group.together(work)
    except RuntimeError as error:
        return str(error)
    return ""


def facts_of_all(group: Group) -> list[dict[str, str]]:
    return group.everyones({"rank": str(group.rank)})


def test_ranks_get_facts_of_all_in_order() -> None:
    assert run_ranks(facts_of_all, 2) == [[{"rank": "0"}, {"rank": "1"}]] * 2


def go_on_where_rank_1_has_another_cpu(group: Group, job: TrainJob, again: TrainJob) -> str:
    run_rank(job, group, ListClient())
    if group.rank == 1:
        exactness._cpu_model = lambda: "of another maker"
    return run_rank(again, group, ListClient()).exactness


def test_other_cpu_of_one_rank_ends_bit_exactness(tmp_path: Path) -> None:
    job, again = (make_job(tmp_path, workers=2, max_steps=steps, attempt=steps) for steps in (1, 2))
    said = run_ranks(go_on_where_rank_1_has_another_cpu, 2, job, again)[0]
    assert re.fullmatch("same-order: CPU .* -> rank 0: .*, rank 1: .* of another maker", said)


def test_waiting_rank_learns_of_a_failed_one() -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        run_ranks(fail_on_rank_1, 2)


def lose_the_other(group: Group) -> None:
    if group.rank == 1:
        raise ConnectionError("rank 1 is gone")
    recipe = Recipe(Collective(), "model.py:Collective")
    recipe.loss(torch.nn.Identity(), {"label": torch.ones(3)})


class Collective:
    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        for _ in range(1000):
            torch.distributed.all_reduce(batch["label"])
        return batch["label"].mean()


def test_rank_lost_in_recipes_collective_is_not_a_recipe_error() -> None:
    with pytest.raises(RuntimeError) as caught:
        run_ranks(lose_the_other, 2)
    assert not isinstance(caught.value, PenstockError)
