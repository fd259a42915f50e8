"""How is what goes deleted, so that a kill leaves nothing half and a run that begins meanwhile loses nothing?

1. What goes is noted, and marked in its records: nobody begins to use it from here on (see ingest/materialize/in_use.py).
2. The storage is looked at again: a run that had begun before that is seen now, and what it uses is marked no more.
3. The files are deleted, those that commit others first. A kill leaves marks and files that the next cleaning finishes.
4. The records that stay of them are compressed.

The lease of the pipeline's name is held from the first look to the second, for moments: a run that starts waits for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from penstock.errors import LeaseHeldError
from penstock.ingest.feed.node_cache import NodeCache
from penstock.ingest.manifest import UNIT_RECORD, DatasetManifest, manifest_path, unit_path
from penstock.ingest.materialize.in_use import ROOM_LEASE, end_going, note_going
from penstock.ingest.materialize.unit import committed
from penstock.lease import hold_lease
from penstock.storage import Storage
from penstock.tasks.records.ledger import Cleaned, Ledger, StageRecord, lease_path, sweep_lease_path, utc_now
from penstock.tasks.room.holdings import look
from penstock.tasks.room.plan import Going, Holdings, RoomPlan, plan_room
from penstock.tasks.room.spec import RetentionSpec

__all__ = ["Cleaning", "clean"]

_DELETES_AT_ONCE = 16


@dataclass(frozen=True)
class Cleaning:
    """Which pipeline is cleaned, and how.

    Attributes:
        aliased: version of a model, as `models:/name/3` -> the alias it has now.
        by: what runs leave on record, as in `penstock clean of ann on host`.
    """

    ledger: Ledger
    pipeline: str
    retention: RetentionSpec
    aliased: Mapping[str, str]
    by: str

    def look(
        self, own: Iterable[str] = (), known: Mapping[str, frozenset[str]] | None = None, marked: Collection[str] = ()
    ) -> Holdings:
        """What lies in the storage now; arguments as of `penstock.tasks.room.holdings.look`."""
        return look(self.ledger, self.pipeline, self.aliased, own=own, known=known, marked=marked)

    def plan(self, found: Holdings | None = None) -> RoomPlan:
        """What would go now. Nothing is written.

        Raises:
            ResumeError: the record of a run cannot be read.
        """
        return plan_room(found or self.look(), self.pipeline, self.retention)


def clean(cleaning: Cleaning, tell: Callable[[RoomPlan], None]) -> tuple[Going, ...]:
    """Delete what goes, and return it: less than `tell` announced if a run began to use some of it.

    Args:
        tell: hears what goes before any of it does.

    Raises:
        LeaseHeldError: another process deletes in this storage, or took this one for dead.
        ResumeError: the record of a run cannot be read.
    """
    storage, lost = cleaning.ledger.storage, list[LeaseHeldError]()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lease(storage, ROOM_LEASE, on_lost=lost.append))
        except LeaseHeldError as error:
            raise LeaseHeldError(
                f"another cleaning is at work in {storage.root}: {error.message}", next_step="wait for it to end"
            ) from error
        going, shrinking = _marked(cleaning, tell)
        with ThreadPoolExecutor(1 if storage.is_local else _DELETES_AT_ONCE) as pool:
            for kind in ("dataset", "run", "unit"):  # a dataset before its units; records are gone since they were marked
                for _ in pool.map(partial(_delete, storage, lost), (each for each in going if each.kind == kind)):
                    pass
            for _ in pool.map(partial(_shrink, storage, lost), shrinking):
                pass
        end_going(storage)
    return going


def _marked(cleaning: Cleaning, tell: Callable[[RoomPlan], None]) -> tuple[tuple[Going, ...], tuple[str, ...]]:
    """Mark what goes, and give what nobody has begun to use by then, and the records of it that stay."""
    storage = cleaning.ledger.storage
    with _pipeline_leases(storage, cleaning.pipeline) as own:
        found = cleaning.look(own)
        plan = cleaning.plan(found)
        tell(plan)
        note_going(storage, plan.names("dataset"), plan.names("unit"))
        marks = _Marks(cleaning.ledger, Cleaned(at=utc_now(), by=cleaning.by))
        for each in plan.going:
            marks.set(each)
        again = cleaning.plan(cleaning.look(own, found.units, marks.runs))
        for each in filter(again.uses, plan.going):
            marks.take_back(each)
        going = tuple(each for each in plan.going if not again.uses(each))
        note_going(storage, *({each.name for each in going if each.kind == kind} for kind in ("dataset", "unit")))
    stay = {each.name for each in plan.going if each.kind == "run"} & again.kept.keys()
    shrinking = (path for path in plan.shrinking if path not in (again.used or ()) and path.split("/")[1] not in stay)
    return going, tuple(shrinking)


@contextlib.contextmanager
def _pipeline_leases(storage: Storage, pipeline: str) -> Iterator[frozenset[str]]:
    """Hold the lease of the pipeline's name, and that of its sweep, if it is free."""
    held = set()
    with contextlib.ExitStack() as stack:
        for lease in (lease_path(pipeline), sweep_lease_path(pipeline)):
            with contextlib.suppress(LeaseHeldError):  # the look finds its holder, and the runs stay
                stack.enter_context(hold_lease(storage, lease, brief=True))
                held.add(lease)
        yield frozenset(held)


@dataclass
class _Marks:
    """Marks in records that what they speak of goes, and the records as they were."""

    ledger: Ledger
    cleaned: Cleaned
    before: dict[str, bytes] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)

    def set(self, going: Going) -> None:
        """From here on nobody begins to use it."""
        if going.kind == "run":
            run = self.ledger.load_run(going.name)
            if run is not None and run.cleaned is None:
                self.runs.add(going.name)
                self.ledger.save_run(run.model_copy(update={"cleaned": self.cleaned}))
        elif going.kind == "record":
            with contextlib.suppress(FileNotFoundError):
                self.before[going.name] = self.ledger.storage.read_bytes(going.name)
                self.ledger.storage.delete(going.name)
        elif going.kind == "dataset":
            self._set_output(going.name)

    def _set_output(self, key: str) -> None:
        path = f"stages/materialize/{key}.json"
        record = self.ledger.stage_record(path, key)
        if record is None:
            return
        self.before[path] = self.ledger.storage.read_bytes(path)
        # Rows, classes and digests stay, which compare and report read; the list of shards may be long.
        output = DatasetManifest.model_validate(record.output).model_copy(update={"shards": (), "units": ()})
        update = {"cleaned": self.cleaned, "output": output.model_dump(mode="json")}
        self.ledger.save_stage(path, record.model_copy(update=update))

    def take_back(self, going: Going) -> None:
        """A run had begun to use it before it was marked."""
        if going.kind == "run":
            run = self.ledger.load_run(going.name)
            if run is not None and going.name in self.runs:
                self.ledger.save_run(run.model_copy(update={"cleaned": None}))
        elif going.kind == "record" and going.name in self.before:
            self.ledger.storage.create_exclusive(going.name, self.before[going.name])
        elif going.kind == "dataset" and (path := f"stages/materialize/{going.name}.json") in self.before:
            now = self.ledger.stage_record(path, going.name, cleaned=True)
            if now is not None and now.cleaned == self.cleaned:  # else the run has made it again
                self.ledger.save_stage(path, StageRecord.model_validate_json(self.before[path]))


def _shrink(storage: Storage, lost: list[LeaseHeldError], path: str) -> None:
    """Let a record of what is gone take less room. One that a kill leaves as it is says the same."""
    if lost:
        raise lost[0]
    with contextlib.suppress(FileNotFoundError):
        storage.compress_record(path)


def _delete(storage: Storage, lost: list[LeaseHeldError], going: Going) -> None:
    """Delete one thing, the file first that makes its other files count."""
    if lost:
        raise lost[0]
    if going.kind == "dataset":
        storage.delete(manifest_path(going.name))
        storage.delete(f"datasets/{going.name}")
    elif going.kind == "unit":
        if not storage.is_local and (record := committed(storage, going.name)) is not None:
            NodeCache().forget({shard.digest for shard in record.shards})
        storage.delete(unit_path(going.name, UNIT_RECORD))
        storage.delete(unit_path(going.name))
    elif going.kind == "run":
        # A checkpoint without its manifest is none.
        for path in sorted(going.paths, key=lambda path: not path.endswith("/manifest.json")):
            storage.delete(path)
        for folder in sorted({path.split("/")[2] for path in going.paths if path.count("/") > 2}):
            storage.delete(f"runs/{going.name}/{folder}")
