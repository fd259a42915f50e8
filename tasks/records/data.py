"""What is on record of a run's data? Files, rows, classes and source columns, by the profiles that materialize recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.materialize.profile import Profile
from penstock.ingest.read.snapshot import SourceSnapshot
from penstock.tasks.records.ledger import Ledger, Run

__all__ = ["RunData", "dataset_name"]


@dataclass(frozen=True)
class RunData:
    """What is on record of a run's data; None or empty where nothing is.

    Attributes:
        snapshot: output of `read`.
        manifest: output of `materialize`.
        profile: the profile of rows and columns that `materialize` recorded.
    """

    snapshot: SourceSnapshot | None
    manifest: DatasetManifest | None
    profile: Profile

    @classmethod
    def of(cls, ledger: Ledger, run: Run) -> RunData:
        """Read the records of a run, also where its rows are deleted."""
        outputs = {}
        for stage in ("read", "materialize"):
            key = run.keys[stage].key if stage in run.keys else ""
            record = ledger.stage_record(f"stages/{stage}/{key}.json", key, cleaned=True) if key else None
            outputs[stage] = record.output if record is not None else None
        read, prepared = outputs["read"], outputs["materialize"]
        return cls(
            SourceSnapshot.model_validate(read) if read is not None else None,
            DatasetManifest.model_validate(prepared) if prepared is not None else None,
            (ledger.profile(run.keys["materialize"].key) if prepared is not None else None) or Profile(),
        )

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """Map `train/name` to rows, bytes and digest of the content."""
        if self.snapshot is None:
            return {}
        return {
            f"{file.location}/{file.name}": {
                "rows": file.rows,
                "bytes": file.size_bytes,
                "content": file.content or file.fingerprint,
            }
            for file in self.snapshot.files
        }

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes by number; empty if the label is not a class."""
        if self.manifest is None:
            return ()
        schema = self.manifest.feed_schema
        return tuple(schema.classes or map(str, range(schema.num_classes or 0)))

    def class_rows(self) -> dict[str, dict[str, int]]:
        """Split -> class -> rows."""
        counts = self.manifest.extra.get("class_counts", {}) if self.manifest is not None else {}
        return {split: self._named(found) for split, found in counts.items()}

    def split_profile(self, split: str) -> dict[str, Any]:
        """Describe a split's rows for a tracker's page: classes, files and bytes."""
        read = self.snapshot.files if self.snapshot is not None else ()
        found = [file for file in read if file.location == split] or read  # of a fraction, the training files
        classes = self.class_rows().get(split)
        files = {"files": len(found), "bytes": sum(file.size_bytes for file in found)}
        return {**({"classes": classes} if classes else {}), **files}

    def file_classes(self) -> dict[str, dict[str, int]]:
        """Map `train/name` to rows by class, for files with a profile."""
        return {f"{file.location}/{file.name}": self._named(file.classes) for file in self.profile.files if file.classes}

    def _named(self, rows: Mapping[str, int]) -> dict[str, int]:
        names = self.classes
        return {names[int(label)] if int(label) < len(names) else label: count for label, count in rows.items()}


def dataset_name(pipeline: str, split: str) -> str:
    """Name a split's rows for the tracker."""
    return f"{pipeline} {split}"
