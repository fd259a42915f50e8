"""Seed, capture and restore a rank's random generators: Python's, numpy's and torch's."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from penstock.digest import digest_of

__all__ = ["capture_rng", "keeping_rng", "restore_rng", "seed_rng"]

_HEAD = struct.Struct("<q625Id2qd2q")
"""Python's version, state and cached normal number (or nan); numpy's position, whether it has a cached normal number, and that
number; the sizes of torch's and the GPU's states in bytes. Numpy's state follows, then those bytes."""
_NUMPY, _KEYS = "MT19937", 624


def seed_rng(*parts: int) -> None:
    """Seed python's, numpy's and torch's global generators of this process from a few integers, such as (seed, rank)."""
    value = int(digest_of(list(parts))[:16], 16) >> 1  # neighbouring seeds and ranks must not give neighbouring streams
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def capture_rng(device: torch.device) -> Tensor:
    """Encode the state of every global generator of this process, uint8[n]; n depends on the kind of device alone."""
    version, numbers, gauss_next = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    own = torch.get_rng_state().numpy().tobytes()
    cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
    gauss_next = math.nan if gauss_next is None else gauss_next
    head = _HEAD.pack(version, *numbers, gauss_next, position, has_gauss, gauss, len(own), len(cuda))
    content = bytearray().join([head, np.asarray(keys, np.uint32).tobytes(), own, cuda])
    return torch.frombuffer(content, dtype=torch.uint8)


def restore_rng(state: Tensor, device: torch.device) -> None:
    """Restore this process's generators."""
    content = state.numpy().tobytes()
    version, *numbers, gauss_next, position, has_gauss, gauss, torch_bytes, cuda_bytes = _HEAD.unpack_from(content)
    random.setstate((version, tuple(numbers), None if math.isnan(gauss_next) else gauss_next))
    keys = np.frombuffer(content, np.uint32, _KEYS, _HEAD.size)
    np.random.set_state((_NUMPY, keys, position, has_gauss, gauss))
    # Cloned: torch 2.13 sets a generator from the begin of a tensor's storage.
    first = _HEAD.size + keys.nbytes
    torch.set_rng_state(state[first : first + torch_bytes].clone())
    if device.type == "cuda" and cuda_bytes:
        torch.cuda.set_rng_state(state[first + torch_bytes :].clone(), device)


@contextmanager
def keeping_rng(device: torch.device) -> Iterator[None]:
    """Keep this process's generators as they are: random numbers that the block draws do not change the weights."""
    state = capture_rng(device)
    try:
        yield
    finally:
        restore_rng(state, device)
