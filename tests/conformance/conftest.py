"""One small Ray for the whole suite, started only if a feed needs it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=200 << 20,
            _temp_dir=tempfile.mkdtemp(prefix="ray-", dir="/tmp"),
        )  # fmt: skip
    yield
    if started:
        ray.shutdown()
