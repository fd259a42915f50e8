"""How do rows from elsewhere become files? They are written once as Arrow, and are read like any other.

So every process reads the same rows, however often and on whatever machine, and a source that gives others the next time is
noticed by its rows rather than in the middle of a training.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from penstock.digest import digest_of
from penstock.errors import DataError
from penstock.ingest.files.listing import Listing, SourceFile, list_source
from penstock.ingest.formats.arrow_files import write_rows
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.sources.table_files import TableFiles, TableReader
from penstock.ingest.schema import SPLITS, Split
from penstock.ingest.spec import DataSpec
from penstock.messages import shorten
from penstock.progress import announce_wait
from penstock.storage import Storage
from penstock.stores import is_local

__all__ = ["KeptFormat", "Origin"]


class Origin(NamedTuple):
    """Rows from elsewhere than files, before they are read."""

    identity: Any
    """JSON that is the same as long as the rows are: they are read again when it changes."""
    rows: Callable[[], Any]
    """Read them: a table, or an iterable of Arrow tables or record batches, pandas DataFrames, or dicts of arrays."""
    version: str = ""
    """Part of the files' names, so that it is in the key and in what is shown: `version-12`."""
    reading: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context around `rows` and the iteration: turns failures into penstock's errors."""
    files: Callable[[], TableFiles | None] | None = None
    """Find the files that hold the same rows and nothing else, which are read as they are; None where there are none."""


class KeptFormat(Format):
    """A source that is no files: rows that are written to the storage first, below `sources/`."""

    extensions = (".arrow",)
    is_kept = True

    def origin(self, data: DataSpec, target: str, base_dir: Path, code_files: Sequence[str]) -> Origin:
        """Find the rows. Runs in the driver whenever the sources are listed.

        Args:
            target: the value of `data.train`, or another split.
            base_dir: the folder of the pipeline file.
            code_files: files besides those that it names on which a source that is user code depends.

        Raises:
            SpecError, DataError, ServiceError: there is nothing there, or it does not answer.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `origin`")

    def listing(self, data: DataSpec, base_dir: Path, storage: Storage, code_files: Sequence[str] = ()) -> Listing:
        """Return the files that hold the rows: those of a table as they are, or files written once.

        Raises:
            SpecError, PreflightError: a source is not there, or its library is not.
            DataError: it cannot be read, or gives something other than rows.
        """
        kept: dict[str, str] = {}
        known: dict[Split, list[SourceFile]] = {}
        states: dict[Split, str] = {}
        for split in data.locations:
            target = data.place(split)
            if isinstance(target, str):
                origin = self.origin(data, target, base_dir, code_files)
                folder = f"sources/{digest_of(origin.identity)}"
                if not storage.exists(f"{folder}/done.json"):
                    note = _keep(origin, target, storage, folder)
                    storage.write_json(f"{folder}/done.json", {"version": 1, "target": target, **note})
                done = storage.read_json(f"{folder}/done.json")
                states[split] = origin.version
                if "files" in done:
                    known[split] = TableFiles.model_validate(done["files"]).listed(split)
                else:
                    kept[split] = storage.uri(f"{folder}/{done['rows_in']}")
        datasets = {name: kept.get(name, place) for name, place in data.datasets.items()}
        update = {**{split: kept[split] for split in SPLITS if split in kept}, "datasets": datasets}
        found = list_source(data.model_copy(update=update), base_dir, self.extensions, known)
        files = [file.model_copy(update={"state": states[file.location]}) for file in found.files]
        return Listing(files, found.left_out)

    def reader(self, data: DataSpec, options: Any) -> TableReader:
        """Read the files that the rows were written to, or those of a table."""
        return TableReader()

    def forget_others(self, files: Sequence[SourceFile], storage: Storage) -> None:
        """Delete what is kept of other sources, or of other states of them, than `files`, which `listing` gave."""
        for folder in storage.list("sources"):
            if not any(file.uri.startswith(f"{storage.uri(f'sources/{folder}')}/") for file in files):
                storage.delete(f"sources/{folder}")


def _keep(origin: Origin, target: str, storage: Storage, folder: str) -> dict[str, Any]:
    """Read the note on where the rows are. It is written last: of two processes at once each writes rows of its own."""
    with origin.reading():
        files = None if origin.files is None else origin.files()
        # Whether a cluster that shares the storage reads them, too, judged by the addresses.
        if files is not None and (storage.is_local or not is_local(files.root)):
            return {"files": files.model_dump(mode="json")}
        attempt = "/".join([uuid.uuid4().hex, *([origin.version] if origin.version else [])])
        with announce_wait(f"the rows of {shorten(target)}, which are copied to the storage once"):
            if not write_rows(storage, f"{folder}/{attempt}/part", origin.rows(), target):
                raise DataError(f"{target} holds no rows", next_step="write or return some, or correct data")
    return {"rows_in": attempt.split("/")[0]}
