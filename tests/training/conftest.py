"""What tests of training share."""

from __future__ import annotations

import mlflow
import pytest


@pytest.fixture
def mlflow_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's process ends with its training; this one goes on."""
    for name, value in vars(mlflow).items():
        if callable(value):
            monkeypatch.setattr(mlflow, name, value)
