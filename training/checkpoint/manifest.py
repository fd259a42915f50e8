"""What does a checkpoint record about itself?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from penstock.config import Section
from penstock.storage import Storage
from penstock.training.state import TrainState

__all__ = ["MANIFEST", "MODEL", "VERSION", "Checkpoint", "CheckpointFacts", "CheckpointManifest", "StoredFile"]

VERSION: Literal[6] = 6

MANIFEST = "manifest.json"

MODEL = "model.safetensors"
"""The weights of a torch model, readable without penstock."""


class StoredFile(Section):
    """One file of a checkpoint."""

    size_bytes: int
    digest: str


class CheckpointFacts(Section):
    """A checkpoint's record, without its files."""

    step: int
    epoch: int
    position: int
    """Rows of `epoch` consumed by all ranks together."""
    world_size: int
    identity: dict[str, str] = Field(default_factory=dict)
    """Values that must be equal to continue: dataset, sample order, batch size."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings that may change between attempts but cost bit-exactness."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions and hardware that bits depend on, of all ranks."""
    metrics: dict[str, float | None] = Field(default_factory=dict)
    """Measured on exactly these weights; None for a value that is not finite."""
    exactness: str = "bit-exact"
    """Whether these weights equal those of a run that was never interrupted, or why not."""
    caveats: list[str] = Field(default_factory=list)
    """Reasons why a run that continues from here may differ: state that no checkpoint holds."""

    def measured_at(self, state: TrainState, values: Mapping[str, float], **others: Any) -> CheckpointFacts:
        """Return them at `state`, with the values measured there; `others` are further fields."""
        metrics = {name: value if math.isfinite(value) else None for name, value in values.items()}
        place = {"step": state.step, "epoch": state.epoch, "position": state.position}
        return self.model_copy(update={**place, "metrics": metrics, **others})

    @classmethod
    def at(cls, state: TrainState, **others: Any) -> CheckpointFacts:
        """Make the facts of a training at `state`; `others` are the remaining fields."""
        return cls(step=state.step, epoch=state.epoch, position=state.position, **others)


class CheckpointManifest(CheckpointFacts):
    """`manifest.json`."""

    version: Literal[6] = VERSION
    weights_digest: str
    created: str
    writer: str = ""
    """The rank 0 that wrote it (fence.py)."""
    files: dict[str, StoredFile]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size_bytes for file in self.files.values())


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    name: str
    manifest: CheckpointManifest
    storage: Storage
    """Rooted at the checkpoint's folder."""

    @property
    def state(self) -> TrainState:
        """The position of training."""
        return TrainState(self.manifest.step, self.manifest.epoch, self.manifest.position)
