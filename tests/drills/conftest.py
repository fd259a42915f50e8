"""Machines with Ray on them, for the drills of one file at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from fsspec import AbstractFileSystem
from s3fs import S3FileSystem

from tests import ROOT
from tests.drills.machines import Machines, Site, reason_not_here
from tests.servers.swift import SwiftServer, UnavailableError, install_swift


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    reason = reason_not_here()
    if reason is not None:
        pytest.skip(reason)
    try:
        programs = install_swift()
    except UnavailableError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("machines")
    with contextlib.ExitStack() as ends, pytest.MonkeyPatch.context() as patch:
        machines = Machines(folder, ROOT)
        ends.callback(machines.close)
        server = SwiftServer(folder / "swift", programs, machines.address(0))
        server.start()
        ends.callback(server.stop)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        for kind in (AbstractFileSystem, S3FileSystem):  # those of another file's server, whose addresses are kept
            kind.clear_instance_cache()
        yield Site(machines, server)
