"""What does every test find around it? State folders of its own, no telemetry, none of the developer's servers."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.servers.swift import SwiftServer, UnavailableError, install_swift, store_client

pytest_plugins = ["tests.shared"]

# A busy machine draws its examples slowly; a test does not fail by that.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

gc.disable()  # until all is imported: see pytest_collection_finish
_STATE = Path(tempfile.mkdtemp(prefix="penstock-tests-"))
if "PYTEST_XDIST_WORKER" in os.environ:
    # Here the environment is that of the process that began this one: empty databases are made once for all of them.
    _KEPT = Path(os.environ["PENSTOCK_CACHE_DIR"]) / "databases"
    for _folder in (_KEPT, _STATE / "shards"):
        _folder.mkdir(parents=True, exist_ok=True)
    (_STATE / "shards/databases").symlink_to(_KEPT)

# Set before any test module imports Prefect, MLflow or Ray: they read the environment on import.
for _name in (
    "PREFECT_API_URL",
    "PREFECT_API_KEY",
    "PREFECT_PROFILE",
    "RAY_ADDRESS",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_EXPERIMENT_NAME",
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL",
    "AWS_SESSION_TOKEN",
):
    os.environ.pop(_name, None)
os.environ.update(
    {
        "PREFECT_HOME": str(_STATE / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PENSTOCK_CACHE_DIR": str(_STATE / "shards"),
        "MPLCONFIGDIR": str(_STATE / "matplotlib"),
        "MPLBACKEND": "Agg",
        "DO_NOT_TRACK": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # Ray's workers are nicer than what waits for them here (15); on a busy machine they would starve until a test gives up.
        "RAY_worker_niceness": "0",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
)


def pytest_unconfigure() -> None:
    # A flow that a test calls in its own process makes Prefect start one, which outlives a process that xdist ends.
    prefect: Any = sys.modules.get("prefect.server.api.server")
    for server in [*prefect.SubprocessASGIServer._instances.values()] if prefect else ():
        server.stop()
    shutil.rmtree(_STATE, ignore_errors=True)


def pytest_collection_finish() -> None:
    """What is there for good, among it every library, is not looked through again: a whole collection takes a second."""
    gc.freeze()
    gc.enable()


_SECONDS = {
    "tests/drills/test_machines.py": 410,
    "tests/runs/test_end_to_end.py": 270,
    "tests/runs/test_deploy.py": 390,  # beside the file above it waits for nothing, as those that need `calm` would
    "tests/runs/test_on_servers.py": 370,
    "tests/runs/test_python_page.py": 230,
    "tests/runs/test_boosted.py": 200,
    "tests/drills/test_prefect_away.py": 280,
    "tests/runs/test_ray_loop.py": 180,
    "tests/runs/test_templates.py": 150,
    "tests/drills/test_no_secret_is_written.py": 210,
    "tests/drills/test_unshared_storage.py": 210,
    "tests/training/on_ray/test_trainer.py": 150,
    "tests/runs/test_overlap.py": 160,
    "tests/runs/test_examples.py": 120,
    "tests/runs/test_caches.py": 210,
    "tests/flows/servers/test_prefect_server.py": 150,
    "tests/drills/test_nth_call.py": 160,
    "tests/drills/test_killed_sweep.py": 160,
    "tests/runs/test_extensions.py": 230,
    "tests/guides/test_whole_runs.py": 150,
    "tests/runs/test_lightning.py": 110,
    "tests/flows/servers/test_ray_local.py": 150,
    "tests/ingest/materialize/test_peak_memory.py": 150,
    "tests/drills/test_score_on_machines.py": 150,  # there are machines for one file at a time
    "tests/runs/test_on_lists.py": 110,
    "tests/test_border.py": 160,
    "tests/runs/test_promote.py": 110,
    "tests/tasks/promote/test_promote.py": 80,
    "tests/conformance/test_orders_and_ranks.py": 80,
    "tests/conformance/test_feed_resume.py": 70,
    "tests/drills/test_kill_anywhere.py": 100,
    "tests/training/loop/test_loop.py": 90,
    "tests/runs/test_predict.py": 90,
    "tests/drills/test_nightly_retention.py": 80,
}
"""Files that take minutes, in the order in which they begin: begun last, one of them would keep one process busy while the
others have nothing to do. The seconds are those of their drills, on two idle cores beside three other files."""

_OTHER_S = 30
"""Of the drills of any other file."""

_THEN = ("tests/drills/", "tests/runs/", "tests/training/", "tests/flows/")
"""Folders whose other files begin next."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--third", type=int, choices=(0, 1, 2), help="run only a third of the files with chosen tests")
    parser.addoption(
        "--begin-until", type=float, metavar="T", help="after this time (of `date +%%s`) skip each file that has not begun"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make drills` need not import the many files without a drill: a file that has one says `mark.drill` itself."""
    asked = collection_path.suffix == ".py" and config.option.markexpr.startswith("drill")
    return True if asked and b"mark.drill" not in collection_path.read_bytes() else None


def files_of_third(files: set[str], third: int) -> set[str]:
    """Return a third of the files, by the time that they take; the three thirds together hold each file once."""
    thirds: list[set[str]] = [set(), set(), set()]
    for file in sorted(files, key=lambda file: (-_seconds(file), file)):
        min(thirds, key=lambda chosen: sum(map(_seconds, chosen))).add(file)
    return thirds[third]


def _seconds(file: str) -> int:
    return _SECONDS.get(file, _OTHER_S)


def _turn(file: str) -> int:
    """Return when a file begins, as a number to sort by."""
    starts = [*_SECONDS, *_THEN]
    return next((number for number, start in enumerate(starts) if file.startswith(start)), len(starts))


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Put long files first, mark users of the S3 server `s3`, and drills `slow`; after `-m`, keep the third asked for."""
    for item in items:
        if {"s3_server", "s3_bucket", "rows_bucket"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.s3)
        if item.get_closest_marker("gpu"):
            import torch

            item.add_marker(
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU, or it is hidden: make gpu")
            )
        if item.get_closest_marker("drill"):
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(1800))  # one that took two minutes here took nine on a busy machine
    turns = {file: _turn(file) for file in {item.nodeid.partition("::")[0] for item in items}}
    items.sort(key=lambda item: turns[item.nodeid.partition("::")[0]])
    yield
    if config.option.third is not None:
        kept = files_of_third({item.nodeid.partition("::")[0] for item in items}, config.option.third)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid.partition("::")[0] not in kept])
        items[:] = [item for item in items if item.nodeid.partition("::")[0] in kept]


_begun: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    file, until = item.nodeid.partition("::")[0], item.config.option.begin_until
    if until is not None and file not in _begun and time.time() > until:
        pytest.skip("no time left to begin this file (--begin-until)")
    _begun.add(file)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    """A running S3 server. A test that kills it starts it again before it ends."""
    try:
        programs = install_swift()
    except UnavailableError as error:
        pytest.skip(str(error))
    server = SwiftServer(tmp_path_factory.mktemp("swift"), programs)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def s3_bucket(s3_server: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new, empty bucket as `s3://name`; the environment holds endpoint and credentials, for child processes too."""
    from fsspec import AbstractFileSystem
    from s3fs import S3FileSystem

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    # fsspec keeps filesystems by their arguments; endpoint and keys come from the environment, so an older one would be stale.
    for kind in (AbstractFileSystem, S3FileSystem):
        kind.clear_instance_cache()
    name = f"penstock-{uuid.uuid4().hex[:12]}"
    s3_server.client.create_bucket(Bucket=name)
    return f"s3://{name}"


@pytest.fixture(scope="session")
def second_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    """Another store, which knows another secret."""
    try:
        programs = install_swift()
    except UnavailableError as error:
        pytest.skip(str(error))
    server = SwiftServer(tmp_path_factory.mktemp("second-swift"), programs, secret_key="another-secret-of-tests")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def rows_bucket(
    s3_bucket: str, second_s3_server: SwiftServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, str]]]:
    """A bucket of another store than the environment names, and what `stores` says of it; ROWS_... hold its credentials."""
    server = second_s3_server
    monkeypatch.setenv("ROWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("ROWS_SECRET_ACCESS_KEY", server.secret_key)
    settings = {"endpoint": server.endpoint, "region": server.region, "env_prefix": "ROWS"}
    name = f"rows-{uuid.uuid4().hex[:12]}"
    store_client(settings).create_bucket(Bucket=name)
    yield f"s3://{name}", settings
    monkeypatch.delenv("PENSTOCK_STORES", raising=False)
