"""Which weights does a training with `train.start_from` begin with: those of a file, a run, or a registered model?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from penstock.digest import file_digest
from penstock.errors import SpecError
from penstock.storage import Storage
from penstock.training.checkpoint.manifest import MODEL
from penstock.training.checkpoint.store import CheckpointStore
from penstock.training.spec import BestSpec

__all__ = ["START", "StartWeights", "find_start"]

START = "start_from"
"""The file in a run's storage, from which all workers read."""


@dataclass(frozen=True)
class StartWeights:
    """The weights that `train.start_from` names."""

    name: str
    """As written, with an alias replaced by its version (`models:/name/3`)."""
    find_digest: Callable[[], str]
    read: Callable[[], bytes]
    """Fetches the file."""

    @cached_property
    def digest(self) -> str:
        """Of the content: the train stage's key holds it, not the name."""
        return self.find_digest()


def find_start(name: str, base_dir: Path, storage: Storage) -> StartWeights:
    """Look up the file or run that `train.start_from` names, without reading it.

    Args:
        name: a file (`.safetensors`, `.pt`, `.pth`) relative to `base_dir`, or `run:<run>` of `storage`.

    Raises:
        SpecError: it is not there.
    """
    if name.startswith("run:"):
        run = storage.child(f"runs/{Path(name.removeprefix('run:')).name}")
        newest = next(iter(CheckpointStore(run).committed()), None)
        if newest is None or MODEL not in newest.manifest.files:
            raise SpecError(
                f"train.start_from: {name!r} is not a run with a torch model in {storage.uri('')}",
                next_step="penstock status lists the runs (a cleaned one has no weights any more); a registered model is "
                "models:/NAME@ALIAS or models:/NAME/VERSION",
            )
        rule = newest.manifest.settings.get("train.checkpoint.best")
        best = CheckpointStore(run, best=BestSpec.model_validate(rule)).best() if rule is not None else None
        chosen = best or newest  # as the run's own outcome
        return StartWeights(name, lambda: chosen.manifest.weights_digest, partial(chosen.storage.read_bytes, MODEL))
    file = base_dir / name
    if not file.is_file() or file.suffix not in (".safetensors", ".pt", ".pth"):
        raise SpecError(
            f"train.start_from: {name!r} is not a file of weights in {base_dir}",
            next_step="name a .safetensors, .pt or .pth file, run:<run>, or a registered model as models:/NAME@ALIAS",
        )
    return StartWeights(name, partial(file_digest, file), file.read_bytes)
