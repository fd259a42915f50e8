"""Which rows of the source are held out? Read them again with their values before `preprocess`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.ingest.manifest import DatasetManifest
from penstock.ingest.preprocess.chain import rows_at_once, split_rows
from penstock.ingest.preprocess.problems import Origin
from penstock.ingest.preprocess.transform_spec import TransformSpec
from penstock.ingest.read.snapshot import SourceSnapshot
from penstock.ingest.schema import Split
from penstock.ingest.spec import DataSpec
from penstock.storage import Storage
from penstock.tasks.context import RunContext

__all__ = ["HeldOut", "held_out_of"]


@dataclass(frozen=True)
class HeldOut:
    """The held-out rows of a run, in the source and prepared. Picklable: they are read where the model is measured.

    Attributes:
        manifest: of the prepared rows.
        storage: that holds them.
    """

    data: DataSpec
    snapshot: SourceSnapshot
    transforms: Sequence[TransformSpec]
    manifest: DatasetManifest
    storage: Storage

    def location(self, split: Split) -> str:
        """Where the files of a split lie: it has a place of its own, or is a part of the train rows."""
        return split if isinstance(getattr(self.data, split), str) else "train"

    def raw(self, split: Split) -> Iterator[tuple[pa.Table, Origin]]:
        """The rows of a split, with their label, in the columns that the transforms begin with; and their places."""
        files = [file for file in self.snapshot.files if file.location == self.location(split)]
        at_once = rows_at_once(self.data, self.snapshot.arrow_schema(), self.transforms)
        rows = split_rows(self.data, self.snapshot, files, at_once)
        return ((table, origin) for of, table, origin in rows if of == split and origin.unreadable is None)


def held_out_of(ctx: RunContext) -> HeldOut:
    """Collect what is needed to read the held-out rows of this run."""
    spec = ctx.project.spec
    return HeldOut(spec.data, ctx.snapshot, spec.preprocess, ctx.manifest, ctx.storage)
