"""One small Ray for the tests that prepare rows on a cluster, started only if one needs it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray

    started = not ray.is_initialized()
    if started:
        root = str(Path(__file__).parents[2])
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=200 << 20,
            _temp_dir=tempfile.mkdtemp(prefix="ray-", dir="/tmp"),
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}},
        )
    yield
    if started:
        ray.shutdown()
