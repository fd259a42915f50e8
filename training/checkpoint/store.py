"""How is a checkpoint stored, when does it count, and which one does a run continue from?

    checkpoints/step-0000000400-7f3a91/
        model.safetensors     the framework's files under its own names: these two are torch's
        training.safetensors
        manifest.json         written last: sizes and hashes of the others; without it the folder does not count

state_files.py describes the content of torch's two. Nothing here loads torch: commands that only read do without it.

Every write gets a folder of its own (the last part of the name is random), so a step written again after a resume never touches
the files of an older manifest, and a process that should be dead cannot spoil a living one's checkpoint; its later commits
do not count (fence.py). Source: the manifest as the commit point follows OLMo-core's `.metadata` file.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from penstock.digest import file_digest
from penstock.errors import CheckpointError, PenstockError
from penstock.messages import counted, describe_error
from penstock.storage import Storage, sync_directory
from penstock.training.checkpoint.fence import Fence, Writer, WriterRecord
from penstock.training.checkpoint.manifest import MANIFEST, VERSION, Checkpoint, CheckpointFacts, CheckpointManifest, StoredFile
from penstock.training.spec import BestSpec, CheckpointSpec

__all__ = ["CheckpointStore", "Placed", "SavedBytes", "SavedFile", "Snapshot"]

FOLDER = "checkpoints"

_OWN_FILES = {MANIFEST, "model.json"}
"""The second is stored with a framework's files in a model registry."""

_NAME = re.compile(r"^step-(\d{10,})-[0-9a-f]+$")


class SavedFile(Protocol):
    """The content of one file of a checkpoint, held in memory."""

    def save(self, path: Path) -> None:
        """Write the file. Any exception ends the write of the checkpoint."""


@dataclass(frozen=True)
class SavedBytes:
    """A file whose bytes are known, such as a model that is one JSON or binary file."""

    content: bytes

    def save(self, path: Path) -> None:
        """Write it."""
        path.write_bytes(self.content)


@dataclass(frozen=True)
class Placed:
    """Files that lie in the folder of a checkpoint that is not committed: see `CheckpointStore.place`."""

    name: str
    """Of the checkpoint."""
    files: Mapping[str, StoredFile]


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint as copies, so that training goes on meanwhile.

    Attributes:
        files: name to content; `manifest.json` and `model.json` are penstock's own names.
        weights_digest: returns 32 hex characters that are equal for equal weights, such as `penstock.digest.bytes_digest` of
            their bytes. Called once, when the files are written.
        placed: files that are in the checkpoint's folder already.
    """

    facts: CheckpointFacts
    files: Mapping[str, SavedFile]
    weights_digest: Callable[[], str]
    placed: Placed | None = None


_MANIFESTS: dict[str, bytes] = {}
"""Manifests that this process has read from a store, where each is written once: a command looks at the checkpoints often."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        storage: rooted at the run; checkpoints are in `checkpoints/` below it.
        spec: which of them `prune` keeps, and `best` returns; the defaults of a pipeline file without it.
    """

    def __init__(self, storage: Storage, spec: CheckpointSpec | None = None) -> None:
        self._storage = storage.child(FOLDER)
        self._fence = Fence(storage)
        self._record: WriterRecord | None = None
        self.writer = Writer(0)
        """See `take_over`."""
        self._spec = spec or CheckpointSpec()

    def take_over(self, writer: Writer) -> None:
        """Become the writer: later commits of earlier writers do not count. Rank 0 calls it before it reads.

        Raises:
            LeaseHeldError: a later writer has taken over already; `write`, `prune` and `clean` raise it too.
        """
        self._record = self._fence.enter(writer, frozenset(checkpoint.name for checkpoint in self.committed()))
        self.writer = writer

    def check_not_replaced(self) -> None:
        """Raise LeaseHeldError if a later writer has taken over."""
        if self._record is not None:
            self._fence.check(self.writer)

    def newest_writer(self) -> Writer | None:
        """Return the rank 0 that was started last; None before the first."""
        newest = self._fence.newest()
        return newest[0] if newest is not None else None

    @staticmethod
    def new_name(step: int) -> str:
        """Return a new name for a checkpoint of a step."""
        return f"step-{step:010d}-{uuid.uuid4().hex[:6]}"

    def place(self, name: str, files: Mapping[str, Path]) -> dict[str, StoredFile]:
        """Copy local files into the folder of a checkpoint that is not committed, from their disk; any rank may call it.

        Args:
            name: of the checkpoint, by `new_name`.
            files: name in the checkpoint -> local file.

        Raises:
            CheckpointError: the storage refuses (full, gone, no permission).
        """
        folder = self._storage.child(name)
        try:
            with _as_checkpoint_error(folder):
                placed = {file: _copy(folder, file, path) for file, path in files.items()}
                if folder.is_local:
                    for parent in sorted({parent for file in files for parent in Path(file).parents}, reverse=True):
                        sync_directory(folder.local_path(parent.as_posix()))
        except Exception:  # raised again
            for file in files:  # they may fill the disk; the folder has other ranks' files, too
                with contextlib.suppress(Exception):
                    folder.delete(file)
            raise
        return placed

    def write(self, snapshot: Snapshot, before_commit: Callable[[], None] = lambda: None) -> Checkpoint:
        """Write and commit a checkpoint; it counts from the moment its manifest is written.

        Args:
            snapshot: the content.
            before_commit: called when all files are durable and the manifest is not there yet.

        Raises:
            CheckpointError: the storage refuses (full, gone, no permission).
            LeaseHeldError: a later writer has taken over.
        """
        placed = snapshot.placed or Placed(self.new_name(snapshot.facts.step), {})
        if taken := _OWN_FILES & {*snapshot.files, *placed.files}:
            raise CheckpointError(
                f"a checkpoint cannot hold a file {min(taken)!r}, which is penstock's own name",
                next_step="give the framework's file another name",
            )
        name, folder = placed.name, self._storage.child(placed.name)
        try:
            with _as_checkpoint_error(folder):
                files = {file: _put(folder, file, content) for file, content in snapshot.files.items()}
                manifest = CheckpointManifest(
                    **snapshot.facts.model_dump(),
                    weights_digest=snapshot.weights_digest(),
                    created=datetime.now(UTC).isoformat(timespec="milliseconds"),
                    writer=str(self.writer),
                    files={**placed.files, **files},
                )
                self.check_not_replaced()
                before_commit()
                folder.write_bytes(MANIFEST, manifest.model_dump_json(indent=1).encode() + b"\n")
        except Exception:  # raised again
            with contextlib.suppress(Exception):
                folder.delete("")  # it is useless, and may fill the disk
            raise
        return Checkpoint(name, manifest, folder)

    def committed(self) -> list[Checkpoint]:
        """Return every checkpoint that counts and has a readable manifest, newest first. Files are not checked.

        Raises:
            CheckpointError: one is of another version.
        """
        return [found for _, found in self._newest_first() if isinstance(found, Checkpoint)]

    def get(self, name: str) -> Checkpoint:
        """Return the checkpoint `name` if its manifest is readable, even if a writer that does not count made it.

        Raises:
            CheckpointError: it is not there, or its manifest cannot be read.
        """
        found = self._read_manifest(name)
        if isinstance(found, Checkpoint):
            return found
        known = [checkpoint.name for checkpoint in self.committed()]
        raise CheckpointError(
            f"checkpoint {self._storage.uri(name)}: {found or 'manifest.json is missing'}",
            next_step=f"use one of {known or 'none'}",
        )

    def problem(self, name: str, *, deep: bool = True) -> str | None:
        """Check a checkpoint down to the hash of every file; return what is wrong, or None.

        Args:
            deep: without it, only the presence and size of files are checked.
        """
        found = self._read_manifest(name)
        return _damage(found, deep) if isinstance(found, Checkpoint) else found or f"{MANIFEST} is missing"

    def newest_valid(
        self, avoid: Callable[[CheckpointManifest], str | None] | None = None
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint whose files match its manifest, and a warning for each newer one that is not used.

        Args:
            avoid: returns why a run should not continue from a checkpoint if there is another, or None.

        Returns (None, []) for a run without checkpoints.

        Raises:
            CheckpointError: there are committed checkpoints and none can be trusted, or one is of another version.
        """
        newer: dict[str, str] = {}
        second: tuple[Checkpoint, list[str]] | None = None
        for name, found in self._newest_first():
            problem = _damage(found) if isinstance(found, Checkpoint) else found
            if not isinstance(found, Checkpoint) or problem is not None:
                newer[name] = f"is damaged ({problem})"
                continue
            warnings = [_lost(passed, why, found.manifest) for passed, why in newer.items()]
            reason = avoid(found.manifest) if avoid is not None else None
            if reason is None:
                return found, warnings
            second = second or (found, warnings)
            newer[name] = reason
        if second is not None:
            return second
        if newer:
            raise CheckpointError(
                f"none of the {counted(len(newer), 'checkpoint')} in {self._storage.uri()} can be trusted",
                problems=[f"{name} {why}" for name, why in newer.items()],
                next_step="restore one of them from a backup, or start over with `penstock run FILE --fresh`",
            )
        return None, []

    def best(self) -> Checkpoint | None:
        """Return the checkpoint with the best value of the configured metric, the latest of equals; None without one.

        Small validation splits give the same value to many: the one that learned longer is the better guess.
        """
        return next(iter(_ranked(self.committed(), self._spec.best)), None)

    def prune(self, *, ended: bool = False) -> list[str]:
        """Delete all but the newest ones and the best ones; return the deleted names. A kill half-way does no harm.

        Args:
            ended: training has come to its end: with `keep` 0 the model's checkpoint alone stays, the best one or the newest.
        """
        self.check_not_replaced()
        dropped = self.superfluous(ended=ended)
        for name in dropped:
            self._remove(name)
        return dropped

    def superfluous(self, *, ended: bool = False) -> list[str]:
        """Name the checkpoints that `prune` deletes."""
        committed, keep = self.committed(), self._spec.keep
        best = _ranked(committed, self._spec.best)[: self._spec.keep_best]
        newest = committed[: keep if (ended and best) else max(1, keep)]
        kept = {checkpoint.name for checkpoint in [*newest, *best]}
        return [checkpoint.name for checkpoint in committed if checkpoint.name not in kept]

    def clean(self, newest: Checkpoint | None) -> None:
        """Delete folders without a manifest, checkpoints that do not count, and all newer than `newest`, damaged or not.

        A damaged one of the same step goes, too. None can be restored. Rank 0 calls it before a worker group writes.
        """
        self.check_not_replaced()
        counts = self._counting()
        for name in self._names():
            found = self._read_manifest(name)
            newer = newest is None or _step_of(name) > newest.manifest.step
            same_step = newest is not None and _step_of(name) == newest.manifest.step and name != newest.name
            if found is None or not counts(found, name) or newer or (same_step and self.problem(name) is not None):
                self._remove(name)

    def _remove(self, name: str) -> None:
        # The manifest goes first: a folder that lost some files must not look committed.
        _MANIFESTS.pop(self._storage.uri(name), None)
        self._storage.delete(f"{name}/{MANIFEST}")
        self._storage.delete(name)

    def _newest_first(self) -> list[tuple[str, Checkpoint | str]]:
        """Return (name, checkpoint or the problem of its manifest) of every folder that counts.

        A folder without a manifest was never committed, so nothing is lost with it.
        """
        read = [(name, item) for name in self._names() if (item := self._read_manifest(name, is_listed=True)) is not None]
        counts = self._counting()
        found = [(name, item) for name, item in read if counts(item, name)]

        def age(entry: tuple[str, Checkpoint | str]) -> tuple[int, str]:
            name, item = entry
            return _step_of(name), item.manifest.created if isinstance(item, Checkpoint) else ""

        return sorted(found, key=age, reverse=True)

    def _counting(self) -> Callable[[Checkpoint | str, str], bool]:
        """Make the test whether a checkpoint counts: the newest writer wrote or inherited it. An unreadable one passes."""
        newest = (self.writer, self._record) if self._record is not None else self._fence.newest()
        if newest is None:
            return lambda item, name: True
        writer, record = newest
        return lambda item, name: isinstance(item, str) or item.manifest.writer == str(writer) or name in record.inherited

    def _names(self) -> list[str]:
        if self._storage.is_local and self._storage.local_path().is_file():
            raise CheckpointError(
                f"{self._storage.uri()} is a file, and should be the folder of the run's checkpoints",
                next_step="put the folder back, or start over with `penstock run FILE --fresh`",
            )
        return [name for name in self._storage.list() if _NAME.match(name)]

    def _read_manifest(self, name: str, *, is_listed: bool = False) -> Checkpoint | str | None:
        """Return the checkpoint, or why its manifest cannot be used, or None without a manifest.

        Args:
            is_listed: the folder is there, so that a manifest that was read before counts.
        """
        folder = self._storage.child(name)
        try:
            content = (_MANIFESTS.get(folder.uri()) if is_listed else None) or folder.read_bytes(MANIFEST)
        except FileNotFoundError:
            return None
        if not folder.is_local:
            _MANIFESTS[folder.uri()] = content
        try:
            data = json.loads(content)
        except ValueError as error:
            return f"{MANIFEST} is not JSON ({error})"
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(version, int) and version != VERSION:
            raise CheckpointError(
                f"checkpoint {folder.uri()} has version {version}, this penstock reads version {VERSION}",
                next_step="run with the penstock that wrote it, or start over with `penstock run FILE --fresh`",
            )
        try:
            return Checkpoint(name, CheckpointManifest.model_validate(data), folder)
        except ValidationError as error:
            first = error.errors()[0]
            return f"{MANIFEST} is incomplete: {'.'.join(map(str, first['loc'])) or 'top level'}: {first['msg']}"


@contextlib.contextmanager
def _as_checkpoint_error(folder: Storage) -> Iterator[None]:
    """Turn any error of the block into a CheckpointError."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:  # a framework may report a full disk with classes of its own
        raise CheckpointError(
            f"cannot write checkpoint {folder.uri()}: {describe_error(error)}",
            next_step="free space or restore access, then run the same command: it continues from the checkpoint before, "
            "or begins again where there is none",
        ) from error


def _put(folder: Storage, file: str, content: SavedFile) -> StoredFile:
    with _place(folder, file) as path:
        content.save(path)
        stored = StoredFile(size_bytes=path.stat().st_size, digest=file_digest(path))
        folder.put_file(path, file)
    return stored


def _copy(folder: Storage, file: str, source: Path) -> StoredFile:
    """Store a copy of a local file, not through memory; a local copy is hashed, so that the hash is of what is stored."""
    stored = source
    if folder.is_local:
        stored = folder.local_path(file)
        stored.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, stored)
    facts = StoredFile(size_bytes=stored.stat().st_size, digest=file_digest(stored))
    folder.put_file(stored, file)
    return facts


@contextlib.contextmanager
def _place(folder: Storage, file: str) -> Iterator[Path]:
    """Give the path for a new file. On a local disk the final one: without a manifest the folder is not read."""
    if folder.is_local:
        folder.local_path().mkdir(parents=True, exist_ok=True)
        yield folder.local_path(file)
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        yield Path(temporary, file)


def _damage(checkpoint: Checkpoint, deep: bool = True) -> str | None:
    for file, expected in checkpoint.manifest.files.items():
        try:
            if deep:
                with checkpoint.storage.open(file, expected.size_bytes) as stream:
                    if file_digest(stream) == expected.digest:
                        continue
            size_bytes = checkpoint.storage.size(file)
            if size_bytes != expected.size_bytes:
                return f"{file} has {size_bytes:,} bytes, the manifest says {expected.size_bytes:,}"
            if deep:
                return f"the content of {file} does not match the manifest's hash"
        except FileNotFoundError:
            return f"{file} is missing"
    return None


def _lost(name: str, why: str, used: CheckpointManifest) -> str:
    steps = _step_of(name) - used.step
    again = "1 step is" if steps == 1 else f"{steps:,} steps are"
    cost = f"{again} trained again" if steps else "no step is lost"
    return f"checkpoint {name} {why}; continuing from step {used.step:,} instead: {cost}"


def _step_of(name: str) -> int:
    match = _NAME.match(name)
    return int(match[1]) if match else -1


def _ranked(checkpoints: list[Checkpoint], rule: BestSpec | None) -> list[Checkpoint]:
    """Sort the checkpoints that have the metric, the best first, of equals the latest; empty without a rule."""
    if rule is None:
        return []
    sign = 1.0 if rule.mode == "min" else -1.0
    rated = [
        (sign * value, -item.manifest.step, item)
        for item in checkpoints
        if (value := item.manifest.metrics.get(rule.metric)) is not None
    ]
    return [item for *_, item in sorted(rated, key=lambda entry: entry[:2])]
