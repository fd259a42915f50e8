"""How are data deleted so that a kill leaves nothing half, and a run that begins loses nothing?

The cleaning holds a lease of the storage from its first look to its last deletion. No run begins meanwhile: a run takes the
lease of its pipeline's name and then waits for this one, and a cleaning that finds the former held deletes nothing. Beside runs
at work only the files of old runs go. Of each thing the file that makes the others count goes first: what a kill leaves counts
for nothing, and the next cleaning deletes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.errors import LeaseHeldError
from penstock.ingest.manifest import UNIT_RECORD, manifest_path, unit_path
from penstock.lease import LeaseHolder, hold_lease
from penstock.tasks.records.at_work import CLEANUP_LEASE
from penstock.tasks.records.ledger import Cleaned, Ledger, utc_now
from penstock.tasks.retention.inventory import take_inventory
from penstock.tasks.retention.plan import CleanupPlan, Deletion, plan_cleanup
from penstock.tasks.retention.spec import RetentionSpec

__all__ = ["Cleaning"]

_DELETES_AT_ONCE = 16


@dataclass(frozen=True)
class Cleaning:
    """Which pipeline is cleaned, and how.

    Attributes:
        aliased: version of a model, as `models:/name/3` -> the alias it has now.
        by: what cleaned runs have on record, as in `penstock clean on host`.
    """

    ledger: Ledger
    pipeline: str
    retention: RetentionSpec
    aliased: Mapping[str, str]
    by: str

    def plan(self) -> CleanupPlan:
        """Decide what would be deleted now; write nothing.

        Raises:
            LeaseHeldError: a sweep of the pipeline is at work, or a run begins.
            ResumeError: the record of a run cannot be read.
        """
        return plan_cleanup(take_inventory(self.ledger, self.pipeline, self.aliased), self.pipeline, self.retention)

    def clean(self, announce: Callable[[CleanupPlan], None], report: Callable[[str], None]) -> CleanupPlan:
        """Delete what goes, and return it.

        Args:
            announce: called with the plan before anything is deleted.
            report: prints a line, if another cleaning takes longer than two seconds.

        Raises:
            LeaseHeldError: as `plan`; or another process took this one for dead.
            ResumeError: the record of a run cannot be read.
        """
        storage, lost = self.ledger.storage, list[LeaseHeldError]()

        def on_wait(holder: LeaseHolder) -> None:
            report(f"waiting for another cleaning of the storage: {holder.process}")

        with hold_lease(storage, CLEANUP_LEASE, lost.append, brief=True, on_wait=on_wait):
            plan = self.plan()
            announce(plan)

            def delete(each: Deletion) -> None:
                if lost:
                    raise lost[0]
                self._delete(each)

            with ThreadPoolExecutor(1 if storage.is_local else _DELETES_AT_ONCE) as pool:
                for kind in ("run", "dataset", "unit", "source", "record"):  # a dataset before its units
                    list(pool.map(delete, (each for each in plan.deletions if each.kind == kind)))
        return plan

    def _delete(self, each: Deletion) -> None:
        storage = self.ledger.storage
        if each.kind == "run":
            self._mark_run(each.name)
            for path in each.paths:
                if path.endswith("/manifest.json"):  # without it a checkpoint does not count
                    storage.delete(path)
            for part in sorted({"/".join(path.split("/")[:3]) for path in each.paths}):
                storage.delete(part)
        elif each.kind == "dataset":
            self._mark_output(each.name)
            storage.delete(manifest_path(each.name))
            storage.delete(f"datasets/{each.name}")
        elif each.kind in ("unit", "source"):
            folder = unit_path(each.name) if each.kind == "unit" else f"sources/{each.name}"
            storage.delete(f"{folder}/{UNIT_RECORD if each.kind == 'unit' else 'done.json'}")
            storage.delete(folder)
        else:
            storage.delete(each.name)

    def _mark_run(self, name: str) -> None:
        run = self.ledger.load_run(name)
        if run is not None and run.cleaned is None:
            self.ledger.save_run(run.model_copy(update={"cleaned": Cleaned(at=utc_now(), by=self.by)}))

    def _mark_output(self, key: str) -> None:
        """Keep the record of a dataset, to be read."""
        path = f"stages/materialize/{key}.json"
        record = self.ledger.stage_record(path, key)
        if record is not None:
            self.ledger.save_stage(path, record.model_copy(update={"cleaned": Cleaned(at=utc_now(), by=self.by)}))
