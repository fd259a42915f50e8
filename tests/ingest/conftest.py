"""One small Ray for the tests that prepare rows on a cluster, and a small cached dataset for those that read one."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.ingest.manifest import DatasetManifest
from penstock.storage import Storage
from tests import ROOT
from tests.conformance.feed_cases import write_dataset
from tests.runs.forked import fork_workers_from_here


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    import ray

    started = not ray.is_initialized()
    if started:
        fork_workers_from_here()
        root = str(ROOT)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the Makefile hides GPUs; Ray refuses more than it may see
        ray.init(
            "local",
            num_cpus=2,
            num_gpus=1,
            resources={"prepares": 1},
            labels={"pool": "cpu"},
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


@pytest.fixture(autouse=True)
def handles_of_ray_are_freed_between_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test was once seen to hang where it began an actor: garbage of the tests before is not collected in a call of Ray."""
    yield
    if "ray_cluster" in request.fixturenames:
        gc.collect()


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "storage"))


@pytest.fixture
def manifest(storage: Storage, tmp_path: Path) -> DatasetManifest:
    return write_dataset(storage, tmp_path / "scratch", 4)


@pytest.fixture
def remote(storage: Storage, manifest: DatasetManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """The same files behind a URL, so that they count as remote."""
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    return Storage(f"local://{storage.root}")
