"""Which weights does a training with `train.start_from` begin with: those of a file, a run, or a registered model?"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from penstock.digest import file_digest
from penstock.errors import CheckpointError, SpecError
from penstock.storage import Storage
from penstock.training.checkpoint.folder import FOLDER, fetch_folder, files_in, folder_digest, kept_name
from penstock.training.checkpoint.manifest import MODEL, Checkpoint
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.spec import CheckpointSpec

__all__ = ["START", "StartWeights", "find_start", "refuse_other_framework"]

START = "start_from"
"""The file in a run's storage from which all workers read, or the folder, for a function."""


@dataclass(frozen=True)
class StartWeights:
    """The weights that `train.start_from` names."""

    name: str
    """As written, with an alias replaced by its version (`models:/name/3`)."""
    find_digest: Callable[[], str]
    read: Callable[[], bytes]
    """Fetches the file with the weights."""
    fetch: Callable[[Path], None] | None = None
    """Writes the files into a local folder, for a function, which gets them as they are."""

    @cached_property
    def digest(self) -> str:
        """Of the content: the train stage's key holds it, not the name."""
        return self.find_digest()

    def store(self, run_storage: Storage) -> None:
        """Copy the weights, or the folder, into the storage of a run."""
        if self.fetch is None:
            run_storage.write_bytes(START, self.read())
            return
        run_storage.delete(START)
        with tempfile.TemporaryDirectory(prefix="penstock-start-") as folder:
            self.fetch(Path(folder))
            for name, path in files_in(Path(folder)).items():
                run_storage.child(START).put_file(path, kept_name(name, ()))  # as fetch_folder wants them


def refuse_other_framework(name: str, theirs: str, own: str) -> None:
    """Raise SpecError for a run or a model of another framework, which lacks the file that `own` begins with."""
    if theirs != own:
        raise SpecError(
            f"train.start_from: {name} was trained with train.framework: {theirs}, and this pipeline has train.framework: {own}"
            ", which cannot begin with its weights",
            next_step=f"name a run or a model of {own} (penstock status lists the runs), or set train.framework: {theirs}",
        )


def find_start(
    name: str, base_dir: Path, storage: Storage, *, whole: bool = False, file: str = MODEL, framework: str = "torch"
) -> StartWeights:
    """Look up the file or run that `train.start_from` names, without reading it.

    Args:
        name: a file (`.safetensors`, `.pt`, `.pth`, or of trees) relative to `base_dir`, or `run:<run>` of `storage`.
        whole: for a function: any file or folder, and of a run the folder that was reported, or its weights.
        file: of a checkpoint, with the weights.
        framework: of the pipeline, for an error.

    Raises:
        SpecError: it is not there, or of another framework.
    """
    if name.startswith("run:"):
        run = storage.child(f"runs/{Path(name.removeprefix('run:')).name}")
        newest = next(iter(CheckpointStore(run).committed()), None)
        rule = newest.manifest.settings.get("train.checkpoint.best") if newest is not None else None
        best = CheckpointStore(run, CheckpointSpec(best=rule)).best()
        chosen = best or newest  # as the run's own outcome
        there = chosen.manifest.files if chosen is not None else {}
        files = [each for each in there if each.startswith(f"{FOLDER}/")] if whole else []
        files = files or [each for each in there if each == file]
        if chosen is not None and not files and run.exists("run.json"):
            refuse_other_framework(name, run.read_json("run.json")["spec"]["train"]["framework"], framework)
        if chosen is None or not files:
            kind = "a torch model" if file == MODEL else file
            raise SpecError(
                f"train.start_from: {name!r} is not a run with {kind} in {storage.uri('')}",
                next_step="penstock status lists the runs (a cleaned one has no weights any more); a registered model is "
                "models:/NAME@ALIAS or models:/NAME/VERSION",
            )
        fetch = (lambda into: fetch_folder(_sound(chosen, *files), files, into)) if whole else None
        return StartWeights(name, lambda: chosen.manifest.weights_digest, lambda: _sound(chosen, file).read_bytes(file), fetch)
    place, suffixes = base_dir / name, (".safetensors", ".pt", ".pth") if file == MODEL else (Path(file).suffix,)
    if whole and place.exists():
        return StartWeights(name, partial(_digest, place), place.read_bytes, partial(_copy, place))
    if not place.is_file() or place.suffix not in suffixes:
        raise SpecError(
            f"train.start_from: {name!r} is not a file of weights in {base_dir}",
            next_step=f"name a file ({', '.join(suffixes)}), run:<run>, or a registered model as models:/NAME@ALIAS",
        )
    return StartWeights(name, partial(file_digest, place), place.read_bytes)


def _sound(checkpoint: Checkpoint, *files: str) -> Storage:
    """Return the storage of a checkpoint. Raises CheckpointError if one of these files is not as it was written."""
    for file in files:
        with checkpoint.storage.open(file) as stream:
            if file_digest(stream) != checkpoint.manifest.files[file].digest:
                problem = f"train.start_from: the content of {checkpoint.storage.uri(file)} does not match the manifest's hash"
                raise CheckpointError(problem, next_step="restore it from a backup, or begin with another run or file")
    return checkpoint.storage


def _digest(place: Path) -> str:
    return folder_digest({name: file_digest(path) for name, path in _files(place).items()})


def _copy(place: Path, into: Path) -> None:
    for name, path in _files(place).items():
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, into / name)


def _files(place: Path) -> dict[str, Path]:
    return files_in(place) if place.is_dir() else {place.name: place}
