"""Which random generators does each rank carry along? Python's, numpy's and torch's: every rank draws its own dropout masks."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.digest import digest_of

__all__ = ["capture_rng", "restore_rng", "seed_rng"]


def seed_rng(*parts: int) -> None:
    """Seed python's, numpy's and torch's global generators of this process from a few integers, such as (seed, rank)."""
    value = _mixed(*parts)
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """The state of every global generator of this process, as tensors whose shapes do not depend on what was drawn."""
    version, numbers, gauss_next = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    counters = np.array([position, has_gauss], np.int64)
    state = {
        "python": torch.from_numpy(np.array([version, *numbers], np.int64)),
        "numpy": torch.from_numpy(np.concatenate([counters, keys])),
        # The second number of a pair that was drawn together: python's, or none, and numpy's.
        "gauss": torch.tensor([math.nan if gauss_next is None else gauss_next, gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Put this process's generators back to a captured state."""
    version, *numbers = state["python"].tolist()
    gauss_next, gauss = state["gauss"].tolist()
    random.setstate((version, tuple(numbers), None if math.isnan(gauss_next) else gauss_next))
    position, has_gauss, *keys = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _mixed(*parts: int) -> int:
    """63 well-mixed bits of a few integers: neighbouring seeds and ranks must not give neighbouring streams."""
    return int(digest_of(list(parts))[:16], 16) >> 1
