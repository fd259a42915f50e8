"""Checkpoints as the tracker gets them, without weights."""

from __future__ import annotations

from penstock.storage import Storage
from penstock.training.checkpoint.manifest import Checkpoint, CheckpointManifest

__all__ = ["checkpoint_at"]


def checkpoint_at(step: int, metrics: dict[str, float | None] | None = None) -> Checkpoint:
    """A committed checkpoint of `step` in `/ckpt/step-<step>`, whose files nobody looks at."""
    manifest = CheckpointManifest(
        step=step, epoch=1, position=0, world_size=1, metrics=metrics or {}, weights_digest="d", created="2026", files={}
    )
    return Checkpoint(f"step-{step}", manifest, Storage(f"/ckpt/step-{step}"))
