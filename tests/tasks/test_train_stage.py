"""When does training count as done? When it came to its end, and the weights it ended with can still be read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import CheckpointError, Interrupted, LeaseHeldError, PenstockError, ServiceError
from penstock.flows.spec_file import load_spec
from penstock.ingest.shuffle.order import make_order
from penstock.ingest.spec import ShuffleSpec
from penstock.machine.process import ProcessIdentity
from penstock.progress import silent
from penstock.storage import Storage
from penstock.tasks.records.ledger import Attempt, Ledger, NodeFetches
from penstock.tasks.stage import VerifyContext
from penstock.tasks.train import STAGE, _show_folders, best_warning, newest_shown
from penstock.tasks.train import make_job as stage_job
from penstock.training.checkpoint.fence import Writer
from penstock.training.checkpoint.manifest import CheckpointFacts
from penstock.training.checkpoint.outcome import job_checkpoints, outcome_of
from penstock.training.checkpoint.start_from import START, StartWeights
from penstock.training.checkpoint.store import CheckpointStore, Placed, SavedBytes, Snapshot
from penstock.training.events import CheckpointCommitted, Event, Reported, ShardsFetched, WorkerStarted
from penstock.training.job import TrainJob, TrainOutcome
from penstock.training.spec import BestSpec
from penstock.training.tracking.tracker import Tracker
from tests.drills.project import make_project
from tests.training.digits import make_job


class Trains:
    """A framework whose training takes no time; `saves` says whether its checkpoint arrives in the storage."""

    def __init__(self, status: str, *, saves: bool, events: Sequence[Event] = ()) -> None:
        self.status, self.saves, self.events = status, saves, events
        self.jobs: list[TrainJob] = []

    def train(self, job: TrainJob, *, listener: Any, **others: Any) -> TrainOutcome:
        self.jobs.append(job)
        listener(self.events)
        if self.saves:
            facts = CheckpointFacts(step=7, epoch=1, position=0, world_size=1, identity=job.identity)
            job_checkpoints(job).write(Snapshot(facts, {"weights": SavedBytes(b"w")}, lambda: "digest"))
        return outcome_of(job, self.status)  # type: ignore[arg-type]


def context(folder: Path, framework: Trains, *, stopped: bool = False, start: StartWeights | None = None) -> Any:
    job = make_job(folder, run="runs/run")
    loaded = load_spec(make_project(folder / "project", files=1), [])
    stop = threading.Event()
    said: list[str] = []
    attempt = Attempt(number=1, process=ProcessIdentity.current(), started="")
    ledger = Ledger(job.data_storage)
    if stopped:
        stop.set()
    return SimpleNamespace(
        project=SimpleNamespace(
            spec=loaded.spec, recipe=job.code, framework=framework, callbacks=(), start_from=start, data_config=None
        ),
        manifest=job.manifest,
        order=job.order,
        output=lambda stage: {"fingerprint": job.order.fingerprint},
        storage=job.data_storage,
        work_storage=job.run_storage,
        attempt=attempt,
        run=SimpleNamespace(run="run", sweep=None),
        ledger=ledger,
        tracker=SimpleNamespace(checkpoints=lambda committed: None, charting_machine=nullcontext),
        reporter=SimpleNamespace(progress=lambda stage: silent, report=said.append),
        said=said,
        stopping=SimpleNamespace(stop=stop, signum=15, graceful=False, lost=None),
        overlapped=None,
        need_ray=lambda: True,
        on_report=None,
    )


@pytest.mark.parametrize(
    ("framework", "stopped", "raised", "said"),
    [
        (Trains("finished", saves=False), False, CheckpointError, "run/checkpoints holds no checkpoint of it"),
        (Trains("interrupted", saves=True), False, ServiceError, "training stopped at step 7 although nothing asked for it"),
        (Trains("interrupted", saves=True), True, Interrupted, "stopped at step 7; step-0000000007-.* is saved"),
    ],
    ids=["without a checkpoint", "stopped by nothing", "stopped by a signal"],
)
def test_failed_training_is_not_recorded_as_done(
    tmp_path: Path, framework: Trains, stopped: bool, raised: type[PenstockError], said: str
) -> None:
    with pytest.raises(raised, match=said):
        STAGE.run(context(tmp_path, framework, stopped=stopped))


def test_start_weights_are_stored_until_first_checkpoint(tmp_path: Path) -> None:
    start = StartWeights("models:/m/3", lambda: "digest", lambda: b"weights")
    begun = context(tmp_path, Trains("finished", saves=True), start=start)
    STAGE.run(begun)
    assert begun.work_storage.read_bytes(START) == b"weights" and begun.said == ["train: train.start_from is models:/m/3"]
    begun.work_storage.delete(START)
    STAGE.run(begun)
    assert not begun.work_storage.exists(START), "what continues has weights of its own"


@pytest.mark.parametrize(("lost", "later", "kept"), [(False, False, [3]), (True, False, [7, 3]), (False, True, [7, 3])])
def test_keep_0_deletes_end_after_record_unless_taken_over(tmp_path: Path, lost: bool, later: bool, kept: list[int]) -> None:
    ctx = context(tmp_path, Trains("finished", saves=True))
    keep = ["train.checkpoint.keep=0", "train.checkpoint.best={metric: val/loss}"]
    ctx.project.spec = load_spec(make_project(tmp_path / "keeping", files=1), keep).spec
    store = CheckpointStore(ctx.work_storage, ctx.project.spec.train.checkpoint)
    identity = stage_job(ctx).identity
    facts = CheckpointFacts(step=3, epoch=0, position=8, world_size=1, identity=identity, metrics={"val/loss": 1.0})
    best = store.write(Snapshot(facts, {"weights": SavedBytes(b"w")}, lambda: "digest"))
    output, _ = STAGE.run(ctx)
    assert [each.state.step for each in store.committed()] == [7, 3], "a kill before the record goes on from the end"
    assert output["checkpoint"] == output["best_checkpoint"] == best.name
    if later:
        store.take_over(Writer(2))
    ctx.stopping.lost = LeaseHeldError("taken over", next_step="") if lost else None
    STAGE.publish(ctx, output)
    STAGE.publish(ctx, output)
    assert [each.state.step for each in store.committed()] == kept


def test_reports_reach_on_report_until_it_fails(tmp_path: Path) -> None:
    events = [Reported(step=step, ranks=({"loss": 0.5, "report/pid": 1}, {"loss": 0.7})) for step in (3, 4)]
    ctx = context(tmp_path, Trains("finished", saves=True, events=events))
    seen: list[dict[str, Any]] = []
    warned: list[str] = []

    def on_report(report: dict[str, Any]) -> None:
        seen.append(report)
        assert len(seen) < 3, "one too many"

    ctx.on_report, ctx.warn = on_report, warned.append
    STAGE.run(ctx)
    assert seen[:2] == [{"rank": 0, "step": 3, "loss": 0.5, "report/pid": 1}, {"rank": 1, "step": 3, "loss": 0.7}]
    assert len(seen) == 3 and len(warned) == 1 and warned[0].startswith("on_report failed and is not called again: ")


def test_record_with_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    output, _ = STAGE.run(context(tmp_path, Trains("finished", saves=True)))
    loaded = load_spec(make_project(tmp_path / "again", files=1), [f"storage={tmp_path}"])
    seen = VerifyContext(loaded.project, "run", deep=True)
    assert STAGE.verify(seen, output) is None
    seen.run_storage.delete("checkpoints")
    assert STAGE.verify(seen, output) == f"checkpoint {output['checkpoint']}: manifest.json is missing"
    assert STAGE.verify(seen, {**output, "checkpoint": None}) == "it names no checkpoint"


def test_texts_of_a_shown_folder_hide_secrets(tmp_path: Path) -> None:
    content = b"http://a:canary@h \xff"
    files = {f"folder/{name}": tmp_path / name for name in ("config.json", "notes.TXT", "a.yaml", "b.yml", "w.pt")}
    for file in files.values():
        file.write_bytes(content)
    shown: dict[str, bytes] = {}
    ctx = context(tmp_path, Trains("finished", saves=False))
    store = job_checkpoints(make_job(tmp_path, run="runs/run"))
    facts = CheckpointFacts(step=7, epoch=1, position=0, world_size=1, identity={})
    name = store.new_name(7)
    store.write(Snapshot(facts, {}, lambda: "digest", Placed(name, store.place(name, files))))
    ctx.tracker = SimpleNamespace(log_figure=shown.__setitem__)
    ctx.tracker.log_text = partial(Tracker.log_text, ctx.tracker)
    _show_folders(ctx, store, {"last": name})
    assert shown.pop("checkpoint/last/w.pt") == content and len(shown) == 4
    assert not any(b"canary" in text for text in shown.values())


def test_train_facts_name_registered_step() -> None:
    outcome = dict(status="finished", step=840, epoch=40, position=0, checkpoint="step-840", best_checkpoint="step-126")
    more = dict(model_step=126, weights_digest="d", metrics={"val/accuracy": 1.0}, exactness="bit-exact", world_size=1)
    facts = dict(STAGE.facts({**outcome, **more}))
    assert facts["steps"] == "840, model of step 126" and facts["checkpoint"] == "step-126"
    assert dict(STAGE.facts({**outcome, **more, "model_step": 840}))["steps"] == "840"


def test_best_metric_that_no_checkpoint_has_is_warned_of() -> None:
    outcome = TrainOutcome.model_construct(best_checkpoint=None, metrics={"accuracy": 0.5, "loss": 1.0})
    warning = best_warning(BestSpec(metric="acuracy", mode="max"), outcome)
    assert "no checkpoint has 'acuracy'; did you mean 'accuracy'?" in warning and warning.endswith("it has accuracy, loss")
    assert best_warning(None, outcome) == ""
    assert best_warning(BestSpec(), outcome.model_copy(update={"best_checkpoint": "step-7"})) == ""


def test_terminal_shows_losses_rate_and_validation_while_training() -> None:
    newest = {"train/loss": 0.5, "train/lr": 0.1, "train/step_s": 1.0, "val/f1": 0.7, "val/loss": 0.6, "ranks/0/step_s": 1.0}
    assert newest_shown(newest) == [("loss", 0.5), ("lr", 0.1), ("val/loss", 0.6), ("val/f1", 0.7)]
    assert newest_shown({"accuracy": 0.9, "loss": 0.4, "train/step_s": 1.0}) == [("accuracy", 0.9), ("loss", 0.4)]


def test_fetched_bytes_are_recorded_by_node_over_restarts(tmp_path: Path) -> None:
    def fetched(rank: int, host: str, pid: int, size: int) -> ShardsFetched:
        return ShardsFetched(rank=rank, host=host, pid=pid, bytes=size, wait_s=0.5)

    first = [fetched(0, "a", 1, 100), fetched(1, "a", 2, 30), fetched(2, "b", 1, 40), fetched(0, "a", 1, 130)]
    ctx = context(tmp_path, Trains("finished", saves=True, events=[*first, CheckpointCommitted(name="step-1-x", step=1)]))
    STAGE.run(ctx)
    expected = {"a": NodeFetches(bytes=160, wait_s=1.0), "b": NodeFetches(bytes=40, wait_s=0.5)}
    assert ctx.ledger.attempts("run")[-1].fetched == expected, "with the checkpoint, in case the driver is killed"
    ctx = context(tmp_path / "next", Trains("finished", saves=True, events=[*first, fetched(2, "c", 9, 7)]))
    STAGE.run(ctx)
    assert ctx.attempt.fetched == {**expected, "c": NodeFetches(bytes=7, wait_s=0.5)}, "what a lost process fetched counts"


def test_rank_that_moves_is_reported_with_bytes_of_its_lanes(tmp_path: Path) -> None:
    def started(rank: int, host: str) -> WorkerStarted:
        return WorkerStarted(rank=rank, host=host, pid=1, restart=0)

    # A command before had rank 1 on b; then that node is lost within this one.
    ctx = context(tmp_path, Trains("finished", saves=True, events=[started(0, "a"), started(1, "c"), started(1, "d")]))
    ctx.ledger.save_attempt("run", ctx.attempt.model_copy(update={"workers": {0: "a:1", 1: "b:2"}}))
    ctx.project.spec = load_spec(make_project(tmp_path / "two", files=1), ["train.workers=2"]).spec
    ctx.project.storage = Storage("memory://moves")
    shards = ctx.manifest.shards_of("train")
    ctx.order = make_order(ShuffleSpec(lanes=2), ctx.manifest.rows["train"], [shard.rows for shard in shards])
    (own,) = ctx.order.lane_rows.shards_of(1, 2)
    STAGE.run(ctx)
    whole = f"fetches the 1 shard of its lanes ({shards[own].size_bytes / 1e6:.1f} MB) unless it has them"
    assert ctx.said[1:] == [f"train: rank 1 moves from {here} to {there}, which {whole}" for here, there in ("bc", "cd")]
    assert ctx.project.framework.jobs[0].hosts == ("a", "b"), "ranks are given to nodes as before"
