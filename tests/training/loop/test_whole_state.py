"""Is everything that training depends on in a checkpoint, or is a run that lacks something not called bit-exact?"""

from __future__ import annotations

import random
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.storage import Storage
from penstock.training.checkpoint.exactness import reporting_nondeterminism
from penstock.training.checkpoint.manifest import MODEL, CheckpointFacts, CheckpointManifest
from penstock.training.checkpoint.outcome import job_checkpoints
from penstock.training.checkpoint.start_from import find_start
from penstock.training.checkpoint.state_files import weights_of
from penstock.training.events import Notice, Point, TrainProgress, Warned
from penstock.training.frameworks.torch.loading import load
from penstock.training.frameworks.torch.one_batch import try_batch
from penstock.training.job import TrainJob
from penstock.training.loop.observer import FirstRank, StepTimes
from penstock.training.loop.step_sync import Decision
from penstock.training.model import ModelSpec
from penstock.training.on_ray.start import Start
from penstock.training.ranks import Group
from penstock.training.recipe import load_recipe
from penstock.training.step.learner import Learner
from penstock.training.step.unsaved import Unsaved, unsaved_state
from penstock.usercode.capture import capture
from penstock.usercode.package import CAPTURED
from tests.training.digits import CPU, SCHEMA, ListClient, make_job, train_alone
from tests.training.ranks import train_ranks

HERE = Path(__file__).parents[1]


def job_of(folder: Path, recipe: str, run: str, **more: Any) -> TrainJob:
    job = make_job(folder, run=run, **more)
    return replace(job, code=capture(f"resume_recipes.py:{recipe}", HERE, more.get("params", {})))


def newest(job: TrainJob) -> CheckpointManifest:
    return job_checkpoints(job).committed()[0].manifest


def stopped(folder: Path, recipe: str, at: int = 6, **more: Any) -> tuple[CheckpointManifest, CheckpointManifest]:
    """The manifests at the end of a whole run, and of one that was stopped after `at` steps and continued."""
    more = {"checkpoint": {"every_s": None, "every_steps": at, "keep": 99}, **more}

    def train(job: TrainJob) -> None:
        for name in [name for name in sys.modules if name.startswith(CAPTURED)]:
            del sys.modules[name]  # as in a new process
        train_ranks(job) if more.get("workers", 1) > 1 else train_alone(job)

    whole = job_of(folder, recipe, "whole", **more)
    train(whole)
    parts = job_of(folder, recipe, "parts", attempt=2, **more)
    shutil.copytree(folder / "whole", folder / "parts")
    for checkpoint in job_checkpoints(parts).committed():
        if checkpoint.manifest.step != at:
            shutil.rmtree(folder / "parts" / "checkpoints" / checkpoint.name)
    assert [each.manifest.step for each in job_checkpoints(parts).committed()] == [at]
    train(parts)
    return newest(whole), newest(parts)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("Head", {"clip_norm": 1.0}),
        ("Head", {"clip_norm": 1.0, "precision": "fp16"}),
        ("Center", {"workers": 2}),
        ("Extra", {}),
        ("Normed", {"workers": 2, "callbacks": [{"ema": {"decay": 0.9}}]}),
        ("Fused", {}),
        ("Nested", {}),
        ("NamedPt", {}),
        ("Cosine", {}),
        ("Drops", {"callbacks": [{"resume_recipes.py:Draws": {}}]}),
    ],
)
def test_continued_run_equals_a_whole_one(tmp_path: Path, recipe: str, more: dict[str, Any]) -> None:
    whole, parts = stopped(tmp_path, recipe, **more)
    assert whole.weights_digest == parts.weights_digest and whole.metrics == parts.metrics
    assert whole.exactness == parts.exactness == "bit-exact"


def test_clipping_counts_gradients_of_the_optimizer_alone(tmp_path: Path) -> None:
    loss = []
    for precision in ("fp32", "fp16"):
        job = job_of(tmp_path, "Head", precision, clip_norm=1.0, precision=precision, epochs=4)
        train_alone(job)
        loss.append(newest(job).metrics["val/loss"])
    assert loss[0] == pytest.approx(loss[1], rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "params", "doubt"),
    [
        ("Count", {"on": "recipe"}, "recipe.steps is in no checkpoint"),
        ("Count", {"on": "thaw"}, "1.weight.requires_grad is in no checkpoint, recipe.notes is in no checkpoint"),
        ("AddsUp", {}, "a sum of gradients over several steps is in no checkpoint, recipe.turn is in no checkpoint"),
    ],
)
def test_state_outside_of_checkpoints_costs_bit_exactness(
    tmp_path: Path, recipe: str, params: dict[str, Any], doubt: str
) -> None:
    whole, parts = stopped(tmp_path, recipe, params=params)
    assert (whole.exactness, parts.exactness) == ("bit-exact", f"same-order: {doubt}")
    client = ListClient()
    train_alone(job_of(tmp_path, recipe, "again", params=params, epochs=1), client)
    (warned,) = [event.message for event in client.events if isinstance(event, Warned)]
    assert warned.startswith("no checkpoint holds ") and "recipe." in warned and "register_buffer" in warned


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("global", "resume_recipes.STEPS"),
        ("class", "recipe.steps, resume_recipes.Hidden.steps"),
        ("random", "resume_recipes.RANDOM"),
        *((where, f"recipe.{name}") for where, name in {"object": "count", "iterator": "places", "flag": "ready"}.items()),
        *((where, f"recipe.{where}") for where in ("queue", "array")),
    ],
)
def test_hidden_state_of_user_code_costs_bit_exactness(tmp_path: Path, where: str, names: str) -> None:
    whole, parts = stopped(tmp_path, "Hidden", params={"where": where})
    assert whole.weights_digest != parts.weights_digest
    reasons = ", ".join(f"{name} is in no checkpoint" for name in names.split(", "))
    assert (whole.exactness, parts.exactness) == ("bit-exact", f"same-order: {reasons}")


@pytest.mark.parametrize(
    ("recipe", "callbacks", "name"),
    [("Slows", [], "optimizer.count"), ("Head", [{"resume_recipes.py:Lowers": {}}], "resume_recipes.py:Lowers.count")],
)
def test_state_of_own_optimizer_or_callback_costs_bit_exactness(
    tmp_path: Path, recipe: str, callbacks: list[Any], name: str
) -> None:
    whole, parts = stopped(tmp_path, recipe, at=1, callbacks=callbacks)
    assert whole.weights_digest != parts.weights_digest
    assert parts.exactness == f"same-order: {name} is in no checkpoint"


def test_frozen_part_stays_in_eval_mode(tmp_path: Path) -> None:
    job = job_of(tmp_path, "FrozenNorm", "run", epochs=1)
    train_alone(job)
    weights = weights_of(job_checkpoints(job).committed()[0].storage)
    assert not weights["0.1.running_mean"].any() and weights["1.running_mean"].any()


def test_extra_state_is_in_the_registered_model(tmp_path: Path) -> None:
    job = job_of(tmp_path, "Extra", "run", epochs=1)
    train_alone(job)
    files = Storage(str(tmp_path / "registered"))
    files.write_bytes(MODEL, job_checkpoints(job).committed()[0].storage.read_bytes(MODEL))
    spec = ModelSpec(code=job.code, params={}, feed_schema=SCHEMA, loader="")
    assert load(spec, files).model[1].seen == {"rows": 333}  # type: ignore[index]


def test_state_made_by_the_first_batch_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, "Grows", "run")
    batch = Batch({"image": torch.ones(4, 8, 8), "label": torch.arange(4)}, torch.arange(4).numpy(), 4, 4, 0, 4)
    with pytest.raises(TrainingError, match=r"first batch has changed which state the model has: 0\.bank, 0\.scale;"):
        try_batch(job.code, job.spec, SCHEMA, batch, 1)


def test_state_made_while_training_ends_at_the_next_save(tmp_path: Path) -> None:
    job = job_of(tmp_path, "Grows", "run", params={"after": 3}, checkpoint={"every_s": None, "every_steps": 5})
    with pytest.raises(TrainingError, match=r"what the model or optimizer consists of: 0\.bank, 0\.scale;"):
        train_alone(job)
    assert job_checkpoints(job).committed() == []


def test_state_that_could_not_be_loaded_ends_at_the_save(tmp_path: Path) -> None:
    job = job_of(tmp_path, "Seen", "run")
    with pytest.raises(
        TrainingError, match=r"the state optimizer\.state\.0\.seen\.1 is of <class 'numpy\.float32'>, which cannot be kept"
    ):
        train_alone(job)
    assert job_checkpoints(job).committed() == []


def test_trained_weights_outside_of_the_model_are_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, "Outside", "run")
    batch = Batch({"image": torch.ones(4, 8, 8), "label": torch.arange(4)}, torch.arange(4).numpy(), 4, 4, 0, 4)
    problem = r"has 2 parameters that the model does not have \(of shape \[\(10, 32\), \(10,\)\]\), and a checkpoint holds"
    for train in (partial(train_alone, job), partial(try_batch, job.code, job.spec, SCHEMA, batch, 1)):
        with pytest.raises(TrainingError, match=problem):
            train()


def test_changed_weight_decay_keeps_the_lowered_rate(tmp_path: Path) -> None:
    rates = []
    for run, decay in (("same", 0.0), ("other", 0.1)):
        for attempt, params in ((1, {}), (2, {"decay": decay})):
            more: dict[str, Any] = {"max_steps": 3 * attempt, "callbacks": [{"resume_recipes.py:Halves": {}}]}
            client = ListClient()
            train_alone(job_of(tmp_path, "Decay", run, attempt=attempt, params=params, **more), client)
        points = [event.values for event in client.events if isinstance(event, Point)]
        rates.append([values["train/lr"] for values in points if "train/lr" in values])
        assert ("weight_decay 0.0 -> 0.1" in str(client.events)) == (run == "other")
    assert rates[0] == rates[1] == pytest.approx([0.25 * 0.9**step for step in (3, 4, 5)])


def test_average_of_bfloat16_weights_moves(tmp_path: Path) -> None:
    more: dict[str, Any] = {"callbacks": [{"ema": {"decay": 0.999}}], "checkpoint": {"every_s": None, "every_steps": 4}}
    train_alone(job_of(tmp_path, "Half", "run", max_steps=1, **more))
    job = job_of(tmp_path, "Half", "run", attempt=2, epochs=200, **more)
    checkpoint = job_checkpoints(job).committed()[0]
    begun = weights_of(checkpoint.storage)["1.weight"]
    assert begun.dtype == torch.bfloat16
    from penstock.training.callbacks.callback import Callbacks, Training
    from penstock.training.callbacks.extra.averages import MovingAverage

    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.zeros_(model.weight)

    def start(average: MovingAverage) -> Callbacks:
        callbacks = Callbacks([("ema", average)])
        callbacks.begin(Training(model, None, 0, 1, torch.device("cpu"), False, job.run_storage))
        callbacks.call("start")
        return callbacks

    callbacks = start(MovingAverage())
    torch.nn.init.ones_(model.weight)
    for _ in range(1000):
        callbacks.call("step")
    again = MovingAverage()
    again.load_state_dict(callbacks.state_dict()["states"]["0: ema"])
    again.load_weights(callbacks.weights())
    callbacks = start(again)
    for _ in range(1000):
        callbacks.call("step")
    (shown,) = callbacks.weights().values()
    assert shown.dtype == torch.bfloat16 and float(shown) == pytest.approx(1 - 0.999**2000, abs=0.01)


def test_later_validation_setting_costs_bit_exactness_with_best(tmp_path: Path) -> None:
    best = {"every_s": None, "best": {"metric": "val/loss"}}
    train_alone(make_job(tmp_path, max_steps=7, checkpoint=best))
    job = make_job(tmp_path, attempt=2, checkpoint=best, validate_every_steps=2)
    assert train_alone(job).exactness == "same-order: train.validate_every_steps None -> 2"
    train_alone(make_job(tmp_path, run="plain", max_steps=7))
    assert train_alone(make_job(tmp_path, run="plain", attempt=2, validate_every_steps=2)).exactness == "bit-exact"


def test_validation_at_a_former_end_costs_bit_exactness(tmp_path: Path) -> None:
    best = {"every_s": None, "best": {"metric": "val/loss"}}
    for run, end, exactness in (
        ("a", 9, "same-order: step 9 was validated because training ended there"),
        ("b", 7, "bit-exact"),
    ):
        train_alone(make_job(tmp_path, run=run, max_steps=end, checkpoint=best))
        assert train_alone(make_job(tmp_path, run=run, attempt=2, checkpoint=best)).exactness == exactness


def test_early_stopped_run_goes_on_if_a_setting_changes(tmp_path: Path) -> None:
    more: dict[str, Any] = {"callbacks": [{"early_stopping": {"patience": 1}}], "epochs": 20}
    ended = train_alone(make_job(tmp_path, learning_rate=0.3, **more))
    client = ListClient()
    same = train_alone(make_job(tmp_path, attempt=2, learning_rate=0.3, **{**more, "epochs": 30}), client)
    assert same.state == ended.state and ended.state.epoch < 20
    notices = [event.message for event in client.events if isinstance(event, Notice)]
    assert notices and notices[0].startswith(
        f"nothing to train: ended at step {ended.state.step}: early_stopping: val/loss has"
    )
    other = train_alone(make_job(tmp_path, attempt=3, learning_rate=0.001, **more))
    assert other.state.step > ended.state.step


def test_start_from_run_takes_its_best_weights(tmp_path: Path) -> None:
    best = {"every_s": None, "best": {"metric": "val/loss"}}
    job = make_job(tmp_path / "runs", run="base", recipe="Ages", checkpoint=best)
    train_alone(job)
    chosen = job_checkpoints(job).best()
    assert chosen is not None and (chosen.manifest.step, newest(job).step) == (7, 14)
    assert find_start("run:base", tmp_path, Storage(str(tmp_path))).digest == chosen.manifest.weights_digest


@pytest.mark.parametrize("kind", ["Memory Efficient attention", "Flash Attention", "cuDNN Attention"])
def test_nondeterministic_attention_is_reported(kind: str) -> None:
    seen: list[str] = []
    with reporting_nondeterminism(seen.append), warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
    with reporting_nondeterminism(seen.append):
        text = f"{kind} defaults to a non-deterministic algorithm. To explicitly enable determinism call torch.use_..."
        warnings.warn(text, stacklevel=1)
    assert seen == [kind]


@pytest.mark.parametrize(
    ("kind", "message", "advice"),
    [
        ("memory", r"too little memory for a step: CUDA out of memory\. Tried to allocate 20\.00 GiB \(", "train.batch_rows"),
        ("assert", r"a check on the GPU failed .* a label that is not below the number of classes \(", "train.gpus: 0"),
    ],
)
def test_gpu_error_ends_the_run_with_advice(tmp_path: Path, kind: str, message: str, advice: str) -> None:
    with pytest.raises(TrainingError, match=message) as caught:
        train_alone(job_of(tmp_path, "Device", "run", params={"kind": kind}))
    assert advice in str(caught.value.next_step) and "Process 7" not in str(caught.value)


def test_last_batch_of_one_row_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="Expected more than 1 value per channel") as caught:
        train_alone(job_of(tmp_path, "Normed", "run", batch_rows=83))  # 333 rows: the last batch has one
    assert "train.last_batch: drop" in str(caught.value.next_step)


def test_rate_is_of_the_time_until_losses_were_there(tmp_path: Path) -> None:
    """A GPU is behind the launches: times between them say nothing."""
    job, client, group = make_job(tmp_path), ListClient(), Group(0, 1, CPU)
    recipe = load_recipe(job.code, {})
    learner = Learner(recipe, recipe.build_model(SCHEMA), job.spec, group)
    facts = CheckpointFacts(step=0, epoch=0, position=0, world_size=1)
    with ExitStack() as closes:
        start = Start(job, group, job_checkpoints(job), None, (), facts, stopped=False)
        observer = FirstRank(job, group, *start.first_rank(closes, client), learner, facts)
        times = [StepTimes(t_ms=step, data_wait_s=0.0, global_rows=48, learning_rate=0.1, epoch=0) for step in range(4)]
        met = Decision(stop=False, save=False, end=False, losses=[1.0] * 4, own=[{}] * 4, waits_s=[0.0])
        observer.steps(4, times, met, seconds=2.0)
    rates = [
        (event.values["train/rows_per_s"], event.values["train/step_s"]) for event in client.events if isinstance(event, Point)
    ]
    assert rates == [(96.0, 0.5)] * 4
    assert [event.rows_per_s for event in client.events if isinstance(event, TrainProgress)] == [96.0]


def test_values_that_cannot_be_compared_end_no_training() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name} outside of a request")

    class Odd:
        def __init__(self) -> None:
            self.steps, self.functions, self.request = 0, np.array([lambda: 0], dtype=object), Proxy()
            self.shapes = [torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex64).conj()]
            with torch.inference_mode():
                self.large = torch.zeros(20_000)

    recipe = Odd()
    state = Unsaved(partial(unsaved_state, torch.nn.Linear(2, 2), {"recipe": recipe}))
    recipe.steps = 1
    assert state.changed() == ["recipe.steps"]


def test_list_that_outgrows_the_comparison_is_unsaved_state() -> None:
    class Slow:
        def __repr__(self) -> str:
            raise AssertionError("a set of a million words takes seconds at each save")

    class Keeps:
        def __init__(self) -> None:
            self.seen: list[float] = []
            self.words = {Slow() for _ in range(20_000)}
            self.by_class: dict[int, list[float]] = {0: [], 1: [0.0] * 20_000}

    recipe = Keeps()
    state = Unsaved(partial(unsaved_state, torch.nn.Linear(2, 2), {"recipe": recipe}))
    recipe.seen.append(1.0)
    state.after_step()
    recipe.words.add(Slow())
    recipe.seen.extend([1.0] * 20_000)
    recipe.by_class[0].extend([1.0] * 20_000)
    assert state.changed() == ["recipe.by_class", "recipe.seen", "recipe.words"]


def test_unsaved_state_of_any_shape_is_compared() -> None:
    def counter() -> Callable[[], None]:
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1

        return count

    class Odd:
        def __init__(self) -> None:
            self.call, self.still = counter(), counter()
            self.held: list[Any] = [1]
            self.held.append(self.held)
            self.many, self.generator = [0] * 20_000, torch.Generator().manual_seed(1)
            self.large, self.text, self.late = torch.zeros(20_000), "a", None
            self.teacher = torch.zeros(200, 1, 100).expand(200, 10**9, 100)
            self.queue, self.bank = torch.zeros(65_536, 128), torch.zeros(1 << 24, 2)
            self.random, self.draws, self.names = random.Random(1), np.random.default_rng(1), {"b", "a"}

    model, recipe, loss = torch.nn.Linear(2, 2), Odd(), counter()
    state = Unsaved(partial(unsaved_state, model, {"recipe": recipe, "loss": loss}))
    assert state.changed() == []
    recipe.late = 1  # type: ignore[assignment]
    state.after_step()
    assert state.changed() == []
    torch.rand(1, generator=recipe.generator)
    recipe.large += 1
    recipe.teacher.data[:, :1].mul_(0.9).add_(1)
    recipe.queue.data[1:2], recipe.bank.data[1:4000] = 1, 1
    recipe.held[0], recipe.text, recipe.many[0], recipe.late = 2, "b", 1, 2  # type: ignore[assignment]
    recipe.names.add("c")
    recipe.random.random(), recipe.draws.random()
    recipe.call(), loss()
    model.weight.requires_grad_(False)
    changed = ("bank", "call", "draws", "generator", "held", "large", "late", "names", "queue", "random", "teacher", "text")
    names = ["loss()", *(f"recipe.{name}" for name in changed)]
    assert state.changed(most=99) == [*names, "weight.requires_grad"] and state.changed() == names[:3]
    assert state.changed(saved=["b", 2], most=99) == [
        name for name in [*names, "weight.requires_grad"] if name[-4:] not in ("text", "late")
    ]
