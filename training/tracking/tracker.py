"""How does a run reach a tracking service: its metrics, checkpoints and documents? One object for all attempts of a run.

A service brings a subclass of `Tracker` and of `OpenRun` (training/tracking/sender.py). Points and operations go through one
queue. The operations are `tags` (tags), `params` (params, attempt), `artifact` (name, content as base64), `dataset` (name,
digest, uri, schema, context, profile), `status` (status).

No method but `open` fails because of the service, and only `drain` and `close` wait for it, so tracking trouble never reaches
training. Steps that are executed again after a restart are not logged again: per metric only steps above the highest one so
far are taken.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from penstock.config import leaves
from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import Split
from penstock.redact import first_line, redact, redact_text
from penstock.storage import Storage
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.events import Point
from penstock.training.tracking.sender import OpenRun, Operation, Outbox, Sender

__all__ = ["RunStatus", "Tracker"]

_log = logging.getLogger("penstock.tracking")

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
"""Status of a run without a process; with one it is RUNNING."""


class Tracker(ABC):
    """The driver's way to one tracked run. Thread-safe. Make it with `open`, end it with `close`.

    A subclass brings `default_uri`, `begin` and `find`.
    """

    def __init__(self, run: OpenRun, tracking_uri: str, sender: Sender) -> None:
        self.run = run
        self.tracking_uri = tracking_uri
        self.run_id = run.run_id
        self._sender = sender
        self._lock = threading.Lock()
        self._last_step = dict(run.last_step)
        self._was_finished = run.status == "FINISHED"  # which was sent behind all points
        self._closed = False

    @classmethod
    @abstractmethod
    def default_uri(cls, state_dir: Path) -> str:
        """Where the service is: from the environment, or else below `state_dir`, the pipeline's own folder on this machine."""

    @classmethod
    @abstractmethod
    def begin(cls, tracking_uri: str, experiment: str, run_name: str, run_id: str | None, *, begun: bool) -> OpenRun:
        """Create the run, or reopen it, with status RUNNING.

        Args:
            run_id: of the earlier attempts; a new run is made if it is gone.
            begun: an earlier attempt may have made the run and been killed before its id was recorded: search for `run_name`.

        Raises:
            ServiceError: the service does not answer or refuses.
        """

    @classmethod
    @abstractmethod
    def find(cls, tracking_uri: str, run_id: str) -> OpenRun:
        """Find the run as it is. It may raise any exception."""

    @property
    def url(self) -> str | None:
        """The run's page on a server; None without one."""
        return None

    def fit_key(self, key: str) -> str:
        """The name of a metric as the service takes it."""
        return key

    @classmethod
    def open(
        cls,
        tracking_uri: str,
        experiment: str,
        run_name: str,
        *,
        run_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, Any] | None = None,
        attempt: int = 1,
        outbox: Storage | None = None,
        recovers: bool = True,
    ) -> Self:
        """Create the run, or reopen `run_id`, with status RUNNING.

        Args:
            tracking_uri: the service, as of `default_uri`.
            experiment: name of the pipeline.
            run_name: penstock's id of the run; unique.
            run_id: that of an earlier attempt; a new run is made if it is gone.
            params: the resolved spec, nested.
            attempt: 1 for the first try of this run.
            outbox: where unsent records may wait for the next attempt or for `repair`.
            recovers: whether an earlier attempt may have left some there.

        Raises:
            ServiceError: the service does not answer or refuses.
        """
        run = cls.begin(tracking_uri, experiment, run_name, run_id, begun=attempt > 1)
        sender = Sender(run, outbox)
        tracker = cls(run, tracking_uri, sender)
        tracker.points(sender.recover(Outbox.load(outbox if recovers else None)))
        sender.start()
        tracker.set_tags({"penstock.attempt": str(attempt), **(tags or {})})
        if params:
            found = ((path, value) for path, value in leaves(redact(params)) if value not in ([], ()))
            tracker._put("params", params={path: _as_text(value) for path, value in found}, attempt=attempt)
        return tracker

    @classmethod
    def repair(
        cls,
        tracking_uri: str,
        run_id: str,
        *,
        status: RunStatus,
        tags: Mapping[str, str] | None = None,
        points: Iterable[Point] = (),
        outbox: Storage | None = None,
        drain_s: float = 10.0,
    ) -> str:
        """Deliver the outbox and journal of a killed driver, and replace the status RUNNING by the outbox's, else by `status`.

        The caller has made sure that no living process owns the run. Returns the status that the service has afterwards;
        `UNKNOWN` if it does not answer or lacks the run. Raises nothing.
        """
        try:
            run = cls.find(tracking_uri, run_id)
            sender = Sender(run, outbox)
            tracker = cls(run, tracking_uri, sender)
            left = Outbox.load(outbox)
            tracker.points(sender.recover(left))
            tracker.points(points)
            unsent = [operation.args["status"] for operation in left.operations if operation.kind == "status"]
            if unsent or run.status == "RUNNING":
                tracker._put("status", status=unsent[-1] if unsent else status)
            sender.start()
            if tags:
                tracker.set_tags(tags)
            sender.drain(drain_s)
            sender.stop()
            return cls.find(tracking_uri, run_id).status
        except Exception as error:  # `penstock status` must show the runs even if the service fails
            _log.warning("cannot repair the tracked run %s at %s: %s", run_id, redact_text(tracking_uri), first_line(error))
            return "UNKNOWN"

    def newest_step(self) -> int:
        """The highest step of a point, sent or queued; 0 without one."""
        with self._lock:
            return max((step for key, step in self._last_step.items() if not key.startswith("system/")), default=0)

    def complete_step(self) -> int:
        """The step up to which every point is sent or queued: the journal is needed from there on only. -1 for none."""
        # Points leave in order, so only those of the highest step may be partly missing.
        return self.newest_step() - (not self._was_finished)

    def points(self, points: Iterable[Point]) -> None:
        """Queue points in order; values at a step not above the last one of that metric are left out."""
        with self._lock:
            fresh = [point for point in map(self._take, points) if point.values]
            self._sender.put_points(fresh)

    def log_metrics(self, values: Mapping[str, float], step: int, *, again: bool = False) -> None:
        """Queue values measured now by the driver, such as those of an evaluation.

        Args:
            again: also where the service has a value at this step, which this one replaces as the newest.
        """
        if again:
            with self._lock:
                for name in values:
                    self._last_step.pop(self.fit_key(name), None)
        self.points([Point(time.time_ns() // 1_000_000, step, values)])

    def charting_machine(self) -> AbstractContextManager[None]:
        """Chart the load of this machine, as `system/<name>`, in the block, where the service can."""
        return nullcontext()

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags on the run; values other than strings become JSON.

        Those without a dot are for people: `description` (markdown), `source`, `user`, and `parent`, the `run_id` of the run
        that this one is a part of.
        """
        self._put("tags", tags={key: _as_text(value) for key, value in redact(tags).items()})

    def log_json(self, name: str, value: Any) -> None:
        """Store JSON-able data (secrets hidden) as the artifact `name`."""
        self.log_text(name, json.dumps(redact(value), indent=1, ensure_ascii=False, default=str))

    def log_text(self, name: str, text: str) -> None:
        """Store text as the artifact `name`."""
        self.log_figure(name, redact_text(text).encode())

    def log_figure(self, name: str, content: bytes) -> None:
        """Store an encoded figure, or any bytes, as the artifact `name`."""
        self._put("artifact", True, name=name, content=_encoded(content))

    def log_dataset(
        self, manifest: DatasetManifest, split: Split, *, name: str, uri: str, profile: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Record the rows of a split as an input of the run, by content digest.

        Args:
            name: of the dataset.
            uri: of the source.
            profile: facts about the rows, such as classes; JSON-able.
        """
        self._put(
            "dataset",
            any_order=True,
            name=name,
            digest=manifest.split_digests.get(split, manifest.content_digest),
            uri=redact_text(uri),
            schema=manifest.feed_schema.model_dump(mode="json"),
            context=split,
            profile={"num_rows": manifest.rows.get(split, 0), **redact(profile)},
        )

    def checkpoints(self, present: Iterable[Checkpoint]) -> None:
        """Replace the artifact `checkpoints.json`: exactly the checkpoints that are there now, by step."""
        described = [
            {"name": each.name, "uri": redact_text(each.storage.uri())}
            | each.manifest.model_dump(mode="json", include={"step", "epoch", "metrics"})
            for each in sorted(present, key=lambda each: each.manifest.step)
        ]
        # In its order: an older list must not overwrite a newer one.
        self._put("artifact", name="checkpoints.json", content=_encoded(json.dumps(described, indent=1).encode()))

    def drain(self, timeout_s: float = 30.0) -> int:
        """Wait for the queue. Returns how many points and operations are still unsent."""
        return self._sender.drain(timeout_s)

    def close(self, status: RunStatus | None, drain_s: float = 30.0) -> int:
        """Send what is queued, set the final status, stop all threads. A second call does nothing.

        Args:
            status: None if another process has taken the run over: then nothing is sent, nor written to the outbox.

        Returns:
            Records not delivered within `drain_s`; they wait in the outbox.
        """
        if self._closed:
            return 0
        self._closed = True
        if status is None:
            self._sender.abandon()
            return 0
        self._put("status", status=status)
        left = self._sender.drain(drain_s)
        self._sender.stop()
        if left:
            _log.warning("%d tracking records are unsent; the next `penstock run` or `penstock status` sends them", left)
        return left

    @property
    def all_sent(self) -> bool:
        """Whether, once closed, the service has all records and no outbox is left."""
        return not self._sender.keeps_outbox

    def _take(self, point: Point) -> Point:
        """Reduce a point to its new values, and remember them. Holds the lock."""
        fresh: dict[str, float] = {}
        for name, raw in point.values.items():
            key = self.fit_key(name)
            if point.step > self._last_step.get(key, -1):
                fresh[key] = float(raw)
                self._last_step[key] = point.step
        return Point(point.t_ms, point.step, fresh)

    def _put(self, kind: str, any_order: bool = False, **args: Any) -> None:
        self._sender.put(Operation(kind=kind, args=args, any_order=any_order))


def _encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
