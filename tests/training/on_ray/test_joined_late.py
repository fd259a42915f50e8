"""A rank that does not see where the run is kept says so, with its host's name."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.errors import PreflightError
from penstock.storage import Storage
from penstock.training.on_ray.joined_late import leave_mark, must_see_mark


def test_a_rank_sees_the_mark_of_its_attempt_or_names_its_node_and_the_folder(tmp_path: Path) -> None:
    shared, own = Storage(str(tmp_path / "shared")), Storage(str(tmp_path / "own"))
    leave_mark(shared, 2)
    must_see_mark(shared, 2)
    for storage, attempt in ((own, 2), (shared, 3)):
        with pytest.raises(PreflightError) as refused:
            must_see_mark(storage, attempt)
        assert socket.gethostname() in refused.value.message and str(storage.uri("")) in refused.value.message
