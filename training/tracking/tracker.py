"""What do the stages and the flow require of a tracker, the service that shows a run's metrics, checkpoints and documents?

A tracker is a class of its own for each service; an object of it is the driver's way to one run, the same over all attempts of
a penstock run. Tracking trouble never stops training: no method but `open` may fail because of the service, and only `drain`
and `close` wait for it. `penstock.training.tracking.queued_tracker` brings all of that for a service that can be sent records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self

from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.schema import Split
from penstock.storage import Storage
from penstock.training.checkpoint.manifest import Checkpoint
from penstock.training.events import Point

__all__ = ["RunStatus", "Tracker"]

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
"""Status of a run without a process; with one it is RUNNING."""


class Tracker(Protocol):
    """The driver's way to one tracked run. Thread-safe. Make it with `open`, end it with `close`."""

    @classmethod
    def load(cls) -> None:
        """Import what the first `open` needs. Called in a thread while other things start."""
        ...

    @classmethod
    def default_uri(cls, state_dir: Path) -> str:
        """Where the service is: from the environment, or else below `state_dir`, the pipeline's own folder on this machine."""
        ...

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
    ) -> Self:
        """Create the run, or reopen `run_id`, with status RUNNING.

        Args:
            tracking_uri: the service, as `default_uri` says.
            experiment: name of the pipeline.
            run_name: penstock's id of the run; unique.
            run_id: that of an earlier attempt; a new run is made if it is gone.
            tags: set on the run.
            params: the resolved spec, nested.
            attempt: 1 for the first try of this run.
            outbox: where unsent records may wait for the next attempt or for `repair`.

        Raises:
            ServiceError: the service does not answer or refuses.
        """
        ...

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
    ) -> str:
        """Finish what a killed driver left: deliver its outbox and journal, and replace the status RUNNING by `status`.

        The caller has made sure that no living process owns the run. Returns the status that the service has afterwards;
        `UNKNOWN` if it does not answer or lacks the run. Raises nothing.
        """
        ...

    @property
    def tracking_uri(self) -> str:
        """The service that the run is at."""
        ...

    @property
    def run_id(self) -> str:
        """The service's id of the run: what `open` and `repair` find it by."""
        ...

    @property
    def url(self) -> str | None:
        """The run's page on a server; None without one."""
        ...

    @property
    def local_url(self) -> str | None:
        """The run's page while `penstock ui` is open, if the store is a file of this machine."""
        ...

    @property
    def list_url(self) -> str | None:
        """The page on the server that lists the runs of the experiment; None without one."""
        ...

    def points(self, points: Iterable[Point]) -> None:
        """Take metric points, in order; values at a step not above the last of that metric are left out. Returns at once."""
        ...

    def complete_step(self) -> int:
        """The step up to which every point is there or on its way: the journal is needed from there on only. -1 for none."""
        ...

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """Take values measured now by the driver, such as those of an evaluation."""
        ...

    def log_machine(self, t_ms: int, values: Mapping[str, float]) -> None:
        """Take a sample of the machine that trains, `system/<name>` to value. Samples are counted over all attempts.

        Args:
            t_ms: when it was taken; wall clock, milliseconds since 1970.
            values: what was measured.
        """
        ...

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags on the run. Those without a dot are for people: `description` (markdown), `source`, `user`, and `parent`.

        `parent` is the `run_id` of the run that this one is a part of.
        """
        ...

    def log_json(self, name: str, value: Any) -> None:
        """Keep JSON-able data as the document `name`, such as `evaluation/metrics.json`."""
        ...

    def log_text(self, name: str, text: str) -> None:
        """Keep text as the document `name`."""
        ...

    def log_figure(self, name: str, figure: Any) -> None:
        """Keep a figure as the document `name`: encoded bytes, or anything with matplotlib's `savefig`."""
        ...

    def log_dataset(
        self, manifest: DatasetManifest, split: Split, *, name: str, uri: str, profile: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Record the rows of a split as an input of the run, by content digest and address of the source.

        Args:
            manifest: the prepared dataset.
            name: of the dataset.
            uri: of the source.
            profile: facts about the rows, such as classes; JSON-able.
        """
        ...

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Show a checkpoint that was committed just now. The same name counts once."""
        ...

    def checkpoints(self, present: Iterable[Checkpoint]) -> None:
        """Show exactly `present`: the others of the run are removed."""
        ...

    def drain(self, timeout_s: float = 30.0) -> int:
        """Wait until all is sent, or `timeout_s` has passed. Returns how many records are left."""
        ...

    def close(self, status: RunStatus | None, drain_s: float = 30.0) -> int:
        """Send what is left, set the final status, stop all threads. A second call does nothing.

        Args:
            status: None if another process has taken the run over: then nothing is sent, nor written to the outbox.

        Returns:
            Records not delivered within `drain_s`: they wait in the outbox.
        """
        ...
