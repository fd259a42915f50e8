"""How do `ray.train.report`, `get_checkpoint` and `get_dataset_shard` work on penstock's workers?

Ray Train calls one object of the process for all of them: a `Session`.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray.train
import safetensors.torch
import torch
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils

from penstock.errors import SpecError, TrainingError
from penstock.ingest.feed.batch import Batch
from penstock.ingest.feed.cursor import Feed
from penstock.training.callbacks.early_stopping import EARLY_STOPPING, EarlyStopping
from penstock.training.checkpoint.exactness import with_reason
from penstock.training.checkpoint.folder import FOLDER, fetch_folder, files_in, folder_digest, kept_name
from penstock.training.checkpoint.manifest import Checkpoint, StoredFile
from penstock.training.checkpoint.start_from import START
from penstock.training.checkpoint.store import Placed, SavedBytes, Snapshot
from penstock.training.checkpoint.writer import CheckpointWriter
from penstock.training.events import Notice, Point, Reported, Saving, Shown, TrainProgress, Warned, now_ms
from penstock.training.job import TrainJob
from penstock.training.loop.event_sender import EventSender
from penstock.training.on_ray.start import Start
from penstock.training.open_feeds import open_job_feed
from penstock.training.own_values import OwnValues
from penstock.training.ranks import POLL_S
from penstock.training.rng import capture_rng, restore_rng
from penstock.training.session.data_config import whole_of
from penstock.training.session.reported import Sorted, file_name, over_ranks, sort_values
from penstock.training.session.shard import Shard
from penstock.training.spec import split_names
from penstock.training.state import TrainState

__all__ = ["GENERATORS", "Session", "StopAtCheckpoint", "at_last_batch"]

GENERATORS = "generators.safetensors"
"""Holds `ranks`, each rank's random generators, uint8[ranks, n]; `batches` and `reports`, how many the loop has taken and made;
`seconds` of training; `patience`, the state of early stopping; `ended`, whether it has ended training."""

MOST_FILES = 1000
"""Images, texts and histograms of reports that an attempt sends to the tracker."""

_TRAIN = "train"


class StopAtCheckpoint(BaseException):
    """Leaves the user's function at a stop. Not an Exception, which a loop may catch.

    Args:
        finished: it is the end of training: early stopping.
    """

    def __init__(self, finished: bool = False) -> None:
        super().__init__()
        self.finished = finished


class Session(DistributedTrainFnUtils):  # type: ignore[misc]  # Ray ships no types for it
    """A loop's session on one rank.

    Args:
        start: where this worker group starts.
        own: values that user code logs between reports.
        sender, writer: send events to the driver and write checkpoints; None but on rank 0.
        digest: of the weights in a reported folder, by the digests of its files.
        separate: files of a reported folder that a checkpoint keeps as separate files, for a registry.
        knows_epochs: a report after the last batch ends the epoch, as in a framework's trainer. In a user's loop the epoch ends
            when the loop leaves its pass over the rows.
    """

    def __init__(
        self,
        start: Start,
        own: OwnValues,
        sender: EventSender | None,
        writer: CheckpointWriter | None,
        digest: Callable[[Mapping[str, str]], str] = folder_digest,
        separate: Collection[str] = (),
        knows_epochs: bool = False,
    ) -> None:
        job, group, facts, checkpoint = start.job, start.group, start.facts, start.checkpoint
        self._job, self._group, self._facts, self._store, self._own = job, group, facts, start.store, own
        self._whole = whole_of(job, group.world_size)
        self._sender, self._writer, self._digest, self._separate = sender, writer, digest, separate
        self._knows_epochs = knows_epochs
        self._doubts, self._caveats = dict[str, None](), dict[str, None]()
        """Reasons why the weights may differ from those of an undisturbed run: always, or if a run has continued."""
        self._resumed = checkpoint is not None
        self.state = start.state
        """State of the newest checkpoint."""
        self.first_pass_is_empty = at_last_batch(job, facts.position)
        """Whether the checkpoint was reported inside a pass, after its last batch."""
        self._epoch, self._position = facts.epoch, facts.position
        self._step, self._reported_step = facts.step, facts.step
        self._rows, self._since_s = 0, time.monotonic()
        self._wait_s, self._learn_s, self._rows_since = 0.0, 0.0, 0
        self._batch_since_s: float | None = None
        self._unsealed: list[Point] = []
        self._shards: dict[str, Shard] = {}
        self._temporary = tempfile.TemporaryDirectory(prefix="penstock-loop-")
        self._newest: ray.train.Checkpoint | None = None
        self._saved_step: int | None = None
        """Step of the newest report with a checkpoint; `_newest` is None until someone asks for its files."""
        self._generators: torch.Tensor | None = None
        self._name, self._met, self._taken = group.shared_name(), 0, 0
        """Name for the counts of meetings and of taken batches, which the other ranks see."""
        self._reports, self._earlier_s, self._reported_s = 0, 0.0, time.monotonic()
        self._files, self._left, self._unseen = 0, set[str](), {*job.spec.report}
        self._early, self._early_metric = _early_stopping(job)
        self._ends_early = False
        self.ended_before = False
        """Whether early stopping, with the same settings, ended training at the checkpoint."""
        self._before: tuple[int, int, int, int, float, torch.Tensor | None] | None = None
        """Counters before the last batch, to undo a look at it; None after a report."""
        if checkpoint is None and job.spec.start_from is not None and not knows_epochs:
            there = job.run_storage.child(START)
            fetch_folder(there, there.tree(), folder := Path(self._temporary.name, START))
            self._newest = ray.train.Checkpoint.from_directory(str(folder))
        if checkpoint is not None:
            self._newest = self._unpacked(checkpoint)
            kept = safetensors.torch.load(checkpoint.storage.read_bytes(GENERATORS))
            self._step, self._reports = int(kept["batches"]), int(kept["reports"])
            self._earlier_s = float(kept["seconds"])
            if self._early is not None and len(patience := kept["patience"].tolist()):
                self._early.load_state_dict({"best": patience[0], "since": int(patience[1])})
            same = checkpoint.manifest.settings.get("train.callbacks") == job.settings.get("train.callbacks")
            self.ended_before = bool(kept["ended"]) and same
            if checkpoint.manifest.world_size == group.world_size:
                self._generators = kept["ranks"][group.rank]

    def close(self) -> None:
        """Delete the unpacked folder."""
        self._temporary.cleanup()

    @property
    def exactness(self) -> str:
        """The exactness so far, with the reasons that arose in the loop."""
        return functools.reduce(with_reason, [*self._doubts, *(self._caveats if self._resumed else ())], self._facts.exactness)

    def add_caveat(self, reason: str) -> None:
        """Record why a continued training differs from an undisturbed one: this one, and those from the next checkpoint."""
        self._caveats[reason] = None

    def nondeterministic_op(self, operation: str) -> None:
        """Record a nondeterministic operation, if gradients are recorded or computed."""
        if torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            self._doubts[f"{operation} is not deterministic"] = None

    def get_checkpoint(self) -> ray.train.Checkpoint | None:
        """Return the newest reported checkpoint; before that, the one to continue from, or `train.start_from`.

        Every rank gets the files of all, as the storage has them: the folder that was reported may be deleted.

        Raises:
            TrainingError: it is not in the storage within `train.stall_s`.
        """
        if self._newest is None and self._saved_step is not None:
            self._newest = self._unpacked(self._committed(self._saved_step))
        return self._newest

    def _committed(self, step: int) -> Checkpoint:
        """Wait until the checkpoint is committed, which a thread of rank 0 does."""
        if self._writer is not None:
            self._writer.wait()
        end_s = time.monotonic() + self._job.spec.stall_s
        while time.monotonic() < end_s:
            found = next(iter(self._store.committed()), None)
            if found is not None and found.state.step >= step:
                return found
            time.sleep(POLL_S[0])
        raise TrainingError(
            f"ray.train.get_checkpoint(): the checkpoint of step {step} is not in the storage",
            next_step="look at the lines before this one, and run the same command again",
        )

    def _unpacked(self, checkpoint: Checkpoint) -> ray.train.Checkpoint:
        folder = Path(self._temporary.name, checkpoint.name)
        fetch_folder(checkpoint.storage, checkpoint.manifest.files.keys() - {GENERATORS}, folder)
        return ray.train.Checkpoint.from_directory(str(folder))

    def get_all_reported_checkpoints(self, *given: Any, **options: Any) -> Any:
        """Refuse: only the newest is kept.

        Raises:
            SpecError: always.
        """
        raise SpecError(
            "ray.train.get_all_reported_checkpoints() is not supported in a pipeline",
            next_step="ray.train.get_checkpoint() gives the newest; train.checkpoint.best keeps the best",
        )

    @property
    def stop_wanted(self) -> bool:
        """Whether the driver asks for a stop, on rank 0.

        The next report with a checkpoint is then the last, but for one of a user's function after a pass's last batch.
        """
        return self._sender is not None and self._sender.stop_requested.is_set()

    def get_dataset_shard(self, dataset_info: Any) -> Any:
        """Return `shard`, for Ray's own function."""
        return self.shard(dataset_info.dataset_name or _TRAIN)

    def shard(self, name: str) -> Shard:
        """Return this rank's `Shard` of a dataset: one object for each split, which counts epochs.

        Args:
            name: a split, `valid` or `val`, or a name that `train.datasets` gives to a split.

        Raises:
            SpecError: `name` is not a dataset with rows.
        """
        rows = self._job.manifest.rows
        names = {**{given: given for given in rows}, **split_names(self._job.spec.datasets)}
        there = [known for known, split in names.items() if rows.get(split)]
        if name not in there:
            raise SpecError(
                f"ray.train.get_dataset_shard({name!r}): the pipeline has {', '.join(map(repr, there))}",
                next_step=f"give the data a {names[name]} split"
                if name in names
                else f"name its files, data.datasets: {{{name}: ...}}, or a split, train.datasets: {{{name}: test}}",
            )
        split = names[name]
        if split not in self._shards:
            rank, shares = (0, 1) if split in self._whole else (self._group.rank, self._group.world_size)

            def open_feed(batch_rows: int, device: torch.device) -> Feed:
                spec = self._job.spec.model_copy(update={"batch_rows": batch_rows})
                return open_job_feed(replace(self._job, spec=spec), split, rank, shares, device)

            train = split == _TRAIN
            total = self._job.order.epoch_rows if train else rows[split]
            start = (self._epoch, self._position) if train else (0, 0)
            watched: dict[str, Any] = {"passed": self._passed, "done": self._done} if train else {}
            if train and not self._knows_epochs:
                watched["ended"] = self._ended
            self._shards[split] = Shard(
                split, self._job.manifest.feed_schema, total, shares, open_feed, self._group.device,
                start=start, together=not train, **watched,
            )  # fmt: skip
        return self._shards[split]

    def report(
        self,
        metrics: Mapping[str, Any],
        checkpoint: ray.train.Checkpoint | None = None,
        checkpoint_dir_name: str | None = None,
        checkpoint_upload_mode: Any = None,
        delete_local_checkpoint_after_upload: bool | None = None,
        checkpoint_upload_fn: Any = None,
        validation: Any = False,
    ) -> None:
        """Chart the metrics; commit the ranks' folders, if any, with the place in the rows. A collective.

        A name is rank 0's value, or what `train.report` makes of all ranks' values.

        Raises:
            StopAtCheckpoint: the driver has asked for a stop or early stopping ends training, and this state is saved.
            SpecError: a pipeline does not support a given argument.
            TrainingError: a value is too large, or the ranks do not report together.
        """
        refused = {
            "checkpoint_dir_name": checkpoint_dir_name,
            "checkpoint_upload_fn": checkpoint_upload_fn,
            "validation": validation or None,
        }
        for name, value in refused.items():
            if value is not None:
                raise SpecError(f"ray.train.report: {name} is not supported in a pipeline", next_step="take it out")
        own = sort_values(metrics, draw=self._sender is not None)
        with ExitStack() as closes:
            files = files_in(Path(closes.enter_context(checkpoint.as_directory()))) if checkpoint is not None else None
            there = json.dumps([own.numbers, own.texts, None if files is None else [*files], self._autofilled()])
            ranks = [json.loads(each["report"]) for each in self.meet("reports", report=there)]
            self._report(own, files or {}, ranks)

    def _report(self, own: Sorted, files: Mapping[str, Path], ranks: Sequence[tuple[Any, ...]]) -> None:
        self._before = None
        # Two reports after one batch are two steps of the charts; the count of batches does not change.
        self._reported_step = max(self._step, self._reported_step + 1)
        numbers = [each[0] for each in ranks]
        values: dict[str, float] = numbers[0]
        for name, rule in self._job.spec.report.items():
            if (value := over_ranks(rule, numbers, name)) is not None:
                values = {**values, name: value}
                self._unseen.discard(name)
        chart = {**self._times(), **self._own.totals(), **values}
        if not self._knows_epochs:
            chart |= {name: value for name, value in ranks[0][3].items() if isinstance(value, float)}
            if len(ranks) > 1:
                chart |= {f"workers/{rank}/{name}": each[name] for rank, each in enumerate(numbers) for name in each}
        stop = self._group.from_first(self.stop_wanted)
        if self._early is not None and self._early_metric in values and not self._ends_early:
            self._early.validation(self, values)  # type: ignore[arg-type]  # it calls `stop` alone
        if self._sender is not None:
            point = Point(now_ms(), self._reported_step, chart)
            self._unsealed.append(point)
            self._sender.post(point)
            self._sender.post(Reported(step=self._reported_step, ranks=tuple({**n, **t, **auto} for n, t, _, auto in ranks)))
            self._show(own)
            self._post_progress()
        if all(each[2] is None for each in ranks):
            return
        owners = {name: rank for rank, each in reversed([*enumerate(ranks)]) for name in each[2] or ()}
        if not owners:
            raise TrainingError(
                "ray.train.report got a checkpoint whose folder is empty", next_step="write the state into it before the report"
            )
        at_last = at_last_batch(self._job, self._position)
        if at_last and self._knows_epochs:
            self.state = TrainState(self._reported_step, self._epoch + 1, 0)
        else:
            self.state = TrainState(self._reported_step, self._epoch, self._position)
        self._save({name: path for name, path in files.items() if owners[name] == self._group.rank}, values)
        self._newest, self._saved_step = None, self.state.step
        if self._ends_early or (stop and (self._knows_epochs or not at_last)):
            # After the last batch of a pass a user's loop cannot continue.
            raise StopAtCheckpoint(finished=self._ends_early)

    def _autofilled(self) -> dict[str, Any]:
        """Return what every report of this rank has besides its values: times in seconds, count, date, node, process."""
        now_s = time.monotonic()
        time_s, self._reported_s = now_s - self._reported_s, now_s
        self._reports += 1
        total_s = self._earlier_s + now_s - self._since_s
        numbers = {"report/time_s": time_s, "report/total_s": total_s, "report/iteration": float(self._reports)}
        place = {"report/node": socket.gethostname(), "report/pid": os.getpid()}
        return {**numbers, "report/date": datetime.now(UTC).isoformat(timespec="milliseconds"), **place}

    def _show(self, own: Sorted) -> None:
        """Send the files of rank 0's report to the driver, and name the values that are not kept."""
        assert self._sender is not None
        for name in own.left.keys() - self._left:
            self._left.add(name)
            kinds = "a number, a text, an image (PIL, uint8) or an array of numbers"
            self._sender.post(Warned(message=f"ray.train.report: {name!r} is not kept: {own.left[name]} is not {kinds}"))
        for name, content in own.files.items():
            self._files += 1
            if self._files <= MOST_FILES:
                self._sender.post(Shown(name=file_name(name, self._reported_step), content=content))
            elif self._files == MOST_FILES + 1:
                self._sender.post(Warned(message=f"ray.train.report: after {MOST_FILES:,} images and texts no more are kept"))

    def stop(self, message: str) -> None:
        """End training with the next report that has a checkpoint, maybe this one: early stopping calls it on every rank."""
        self._ends_early = True
        if self._sender is not None:
            self._sender.post(Notice(message=message))

    def ended(self, returned: str) -> list[str]:
        """Wait until the function has ended on every rank; return what it returned on each, as JSON. A collective."""
        everyones = self.meet("has ended", returned=returned)
        if self._sender is not None and self._unseen:
            self._sender.post(Warned(message=f"train.report: {', '.join(sorted(self._unseen))}: no rank has reported it"))
        if self._sender is not None and self._early is not None and self._early.state_dict()["best"] is None:
            watched = f"early_stopping watches {self._early_metric!r}, and rank 0 has not reported it"
            self._sender.post(Warned(message=f"train.callbacks: {watched}"))
        return [each["returned"] for each in everyones]

    def _wait_for_ranks(self, act: str) -> None:
        """Wait for the other ranks. One that has taken a further batch may be in a collective of its own, and never come."""
        group, (wait_s, most_s) = self._group, POLL_S
        others = [rank for rank in range(group.world_size) if rank != group.rank]
        self._met += 1
        if others:
            group.post(f"{self._name}/met/{group.rank}", self._met)
        end_s = time.monotonic() + self._job.spec.stall_s
        while absent := [rank for rank in others if group.posted(f"{self._name}/met/{rank}") < self._met]:
            gone = [rank for rank in absent if group.posted(f"{self._name}/taken/{rank}") > self._taken]
            if gone and time.monotonic() > end_s:  # one that only looked at a batch has come by now
                raise _not_called_by_all({group.rank: act, gone[0]: "goes on"})
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)

    def meet(self, act: str, **facts: str) -> list[dict[str, str]]:
        """Wait until every rank reports, or every rank ends; outside of collectives, which a lone rank would upset.

        Returns:
            The facts of every rank.

        Raises:
            TrainingError: some report while others have ended, or go on without this report.
        """
        self._wait_for_ranks(act)
        everyones = self._group.everyones({"act": act, **facts})
        acts = [each["act"] for each in everyones]
        if len(set(acts)) > 1:
            raise _not_called_by_all(dict(enumerate(acts)))
        return everyones

    def _times(self) -> dict[str, float]:
        """Return the charts of time since the last report. A collective.

        They are rank 0's seconds in all batches (not per step) and in waits, rows per second, and each rank's own.
        """
        ranks = range(self._group.world_size)
        if self._batch_since_s is not None:
            self._done()
            self._batch_since_s = time.perf_counter()
        own = (self._wait_s, self._wait_s + self._learn_s, float(self._rows_since))
        self._wait_s, self._learn_s, self._rows_since = 0.0, 0.0, 0
        flat = self._group.sum([value if rank == self._group.rank else 0.0 for rank in ranks for value in own])
        waits, seconds, rows = flat[::3], flat[1::3], flat[2]
        if not rows:
            return {}
        values = {"train/step_s": seconds[0], "train/data_wait_s": waits[0]}
        values |= {"train/rows_per_s": rows / seconds[0]} if seconds[0] > 1e-3 else {}  # of less, a rate says nothing
        if len(waits) > 1:
            values |= {f"workers/{rank}/data_wait_s": wait_s for rank, wait_s in enumerate(waits)}
            values |= {f"workers/{rank}/step_s": step_s for rank, step_s in enumerate(seconds)}
        return values

    def _done(self) -> None:
        """End the time of a batch: the loop requests the next."""
        if self._batch_since_s is not None:
            self._learn_s += time.perf_counter() - self._batch_since_s
        self._batch_since_s = None

    def _ended(self, epoch: int, looked: bool) -> bool:
        """End a pass of the train split; False if the loop has only looked at a batch, so that the pass does not count."""
        if epoch != self._epoch:
            return True  # an abandoned pass
        if looked and self._before is not None:
            self._step, self._position, self._rows, self._rows_since, self._wait_s, self._generators = self._before
            self._batch_since_s = self._before = None
            return False
        self._epoch, self._position = epoch + 1, 0
        return True

    def _passed(self, epoch: int, batch: Batch, position: int, wait_s: float) -> None:
        """Count a batch of the train split that the loop gets."""
        start = self._position if epoch == self._epoch else 0
        self._before = (self._step, start, self._rows, self._rows_since, self._wait_s, self._generators)
        if self._generators is not None:  # the loop has built its model
            restore_rng(self._generators, self._group.device)
            self._generators = None
        self._step += 1
        self._taken += 1
        if self._group.world_size > 1:
            self._group.post(f"{self._name}/taken/{self._group.rank}", self._taken)
        self._epoch, self._position = epoch, position
        self._rows += batch.global_rows
        self._rows_since += batch.global_rows
        self._wait_s += wait_s
        self._batch_since_s = time.perf_counter()
        self._post_progress()

    def _post_progress(self) -> None:
        if self._sender is not None:
            rows_per_s = self._rows / max(time.monotonic() - self._since_s, 1.0)
            epoch = self._epoch if self._position else max(0, self._epoch - 1)  # between two passes: the finished one
            total = self._job.total_steps if self._knows_epochs else None
            self._sender.post(TrainProgress(step=self._step, total_steps=total, epoch=epoch, rows_per_s=rows_per_s))

    def _save(self, files: Mapping[str, Path], values: Mapping[str, float]) -> None:
        """Write this rank's files into the new checkpoint, from its own disk; rank 0 commits it in the background."""
        generators = self._group.gather(capture_rng(self._group.device))
        name = str(self._group.from_first(self._store.new_name(self.state.step)))
        if self._sender is not None:
            self._sender.post(Saving(step=self.state.step))  # before files are placed, which may take minutes

        def place() -> dict[str, StoredFile]:
            if self._writer is not None:
                self._writer.wait()
            return self._store.place(name, {kept_name(file, self._separate): path for file, path in files.items()})

        own = {file: stored.model_dump() for file, stored in self._group.together(place).items()}
        everyones = self._group.everyones({"placed": json.dumps(own)})
        if self._writer is None or self._sender is None:
            generators()
            return
        placed = {
            file: StoredFile.model_validate(stored) for each in everyones for file, stored in json.loads(each["placed"]).items()
        }
        facts = self._facts.measured_at(self.state, values, exactness=self.exactness, caveats=[*self._caveats])
        best = self._early.state_dict() if self._early is not None else {}
        there = {
            "ranks": generators().contiguous(),
            "batches": torch.tensor(self._step),
            "reports": torch.tensor(self._reports),
            "seconds": torch.tensor(self._earlier_s + time.monotonic() - self._since_s, dtype=torch.float64),
            "ended": torch.tensor(self._ends_early),
            "patience": torch.tensor([*best.values()] if best.get("best") is not None else [], dtype=torch.float64),
        }
        digest = self._digest({file.removeprefix(f"{FOLDER}/"): stored.digest for file, stored in placed.items()})
        points, self._unsealed = self._unsealed, []
        saved = {GENERATORS: SavedBytes(safetensors.torch.save(there))}
        self._writer.submit(lambda: Snapshot(facts, saved, lambda: digest, Placed(name, placed)), points)


def at_last_batch(job: TrainJob, position: int) -> bool:
    """Whether `position` is after all rows of an epoch.

    A user's loop that reports there is still inside its pass: continued, it would find that pass empty, and may need the loss
    of a batch that it did not get.
    """
    return position >= job.order.epoch_rows


def _not_called_by_all(acts: Mapping[int, str]) -> TrainingError:
    which = "; ".join(f"rank {rank} {act}" for rank, act in sorted(acts.items()))
    return TrainingError(
        f"ray.train.report was not called by every worker: {which}",
        next_step="call it on every worker equally often; only rank 0 needs to give a checkpoint",
    )


def _early_stopping(job: TrainJob) -> tuple[EarlyStopping | None, str]:
    """Return the early stopping of a user's loop, whose only callback it may be, and its metric."""
    found = next((each for each in job.callbacks if each.name == EARLY_STOPPING), None)
    if found is None:
        return None, ""
    early = EarlyStopping(**found.params)
    return early, early.metric
