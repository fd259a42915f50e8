"""Does `penstock rollback` wait for a run that moves the alias, and work without the storage?"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from penstock.errors import ServiceError
from penstock.flows.verbs import rollback
from penstock.lease import hold_lease
from penstock.storage import Storage
from penstock.training.registry.mlflow_registry import MLFLOW
from penstock.training.registry.registry import alias_lease


@pytest.fixture
def moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A folder with a storage; the registry has one alias, and notes what is rolled back."""
    (tmp_path / ".penstock").mkdir()
    monkeypatch.chdir(tmp_path)
    found: list[str] = []
    monkeypatch.setattr(type(MLFLOW), "aliases", lambda self, uri, name: {"live": "2", "live-previous": "1"})
    monkeypatch.setattr(type(MLFLOW), "roll_back", lambda self, uri, name, alias: (found.append(alias), ("1", "2"))[1])
    return found


def test_rollback_waits_for_run_moving_alias(moves: list[str]) -> None:
    asks = threading.Event()
    done: list[dict[str, object]] = []

    def ask() -> None:
        asks.set()
        done.append(rollback.roll_back(None, "line"))

    thread = threading.Thread(target=ask)
    with hold_lease(Storage(".penstock"), alias_lease("line"), brief=True):
        thread.start()
        assert asks.wait(60)
        thread.join(timeout=1.0)  # time enough to move the alias, were it not for the lease
        assert thread.is_alive() and moves == []
    thread.join(timeout=60)
    assert moves == ["live"] and done[0]["version"] == "1"


def test_rollback_works_without_storage(moves: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise ServiceError("the store does not answer", next_step="try again")

    monkeypatch.setattr(rollback, "hold_lease", away)
    assert rollback.roll_back(None, "line")["rolled_back"] == "2" and moves == ["live"]
