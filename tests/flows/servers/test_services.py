"""Are configured services honoured, missing ones named, and telemetry off unless asked for?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import ServiceError
from penstock.flows.servers.services import prefect_api, telemetry_off
from penstock.training.tracking.relocate_mlflow import mlflow_uri


def test_telemetry_is_off_and_a_users_own_choice_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "true")
    telemetry_off()
    assert os.environ["DO_NOT_TRACK"] == "true" and os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "true"


def test_the_libraries_understand_that_their_telemetry_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.telemetry.utils import is_telemetry_disabled
    from prefect._internal.analytics.enabled import is_telemetry_enabled
    from ray._common.usage.usage_lib import UsageStatsEnabledness, _usage_stats_enabledness

    monkeypatch.delenv("CI", raising=False)
    telemetry_off()
    assert not is_telemetry_enabled()
    assert is_telemetry_disabled()
    assert _usage_stats_enabledness() is UsageStatsEnabledness.DISABLED_EXPLICITLY


def test_mlflow_is_a_database_below_the_state_directory_unless_a_server_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert mlflow_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert mlflow_uri(tmp_path) == "http://mlflow:5000"


def test_a_configured_prefect_api_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    with pytest.raises(ServiceError, match=r"PREFECT_API_URL=http://127\.0\.0\.1:9/api does not answer"), prefect_api(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
