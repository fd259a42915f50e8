"""Does `penstock deploy` refuse what cannot work, and store nothing secret? (What needs a server: test_deploy.py.)"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apprise
import pytest
import yaml
from prefect.cli.deploy import _models as known
from typer.testing import CliRunner

from penstock.errors import ServiceError, SpecError
from penstock.flows.cli import app
from penstock.flows.deploy.deploy import ENTRYPOINT, Plan, deploy_pipeline
from penstock.flows.deploy.notify import Notify
from tests.drills.project import make_project
from tests.runs.servers import ROOT, free_port

NIGHTLY = "0 3 * * *"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"), files=1)


def deploy(file: Path, cron: str = NIGHTLY, overrides: list[str] | None = None) -> dict[str, Any]:
    return deploy_pipeline(file, Plan(cron), overrides or [], report=lambda _line: None)


def test_deploy_without_server_names_commands(project: Path) -> None:
    with pytest.raises(ServiceError) as refused:
        deploy(project)
    assert refused.value.exit_code == 3
    assert "PREFECT_API_URL is not set" in refused.value.message
    for command in ("prefect server start", "export PREFECT_API_URL=", "the same command again"):
        assert command in refused.value.next_step


def test_unreachable_prefect_server_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    with pytest.raises(ServiceError, match=url):
        deploy(project)


def test_invalid_override_is_not_deployed(project: Path) -> None:
    with pytest.raises(SpecError, match="1 problem"):
        deploy(project, overrides=["train.epochs=-1"])


@pytest.mark.parametrize("cron", ["61 3 * * *", "0 3 * *", "0 0 3 * * *", "@daily", "a b c d e", "", "0 3 31 4,6 *"])
def test_wrong_schedule_is_refused(project: Path, cron: str) -> None:
    with pytest.raises(SpecError) as refused:
        deploy(project, cron)
    assert repr(cron) in refused.value.message
    assert NIGHTLY in refused.value.message, "an example leads on"


def test_unknown_time_zone_is_refused(project: Path) -> None:
    with pytest.raises(SpecError, match="'Europe/Berln' is not a time zone"):
        deploy_pipeline(project, Plan(NIGHTLY, "Europe/Berln"), [], print)


def test_notify_address_is_checked_and_shown_without_secret() -> None:
    assert Notify.parse("https://user:pw@hooks.example.com/services/T0KEN").shown == "https://hooks.example.com..."
    assert Notify.parse("slack://T0KENA/T0KENB/T0KENC").shown == "slack://..."
    webhook = apprise.Apprise.instantiate(Notify.parse("https://user:pw@hooks.example.com:81/a/b?key=a%2Bb&x=1").url)
    assert (webhook.secure, webhook.user, webhook.host, webhook.port) == (True, "user", "hooks.example.com", 81)
    assert (webhook.fullpath, webhook.params) == ("/a/b", {"key": "a+b", "x": "1"})
    for wrong in ("ops@example.org", "ftp://host/T0KEN", "https://", "T0KEN"):
        with pytest.raises(SpecError, match="mailtos://") as refused:
            Notify.parse(wrong)
        assert "T0KEN" not in str(refused.value)
    for changed in ("https://hooks.example.com/T0KEN%2Fb", "https://hooks.example.com/T0KEN;b"):
        with pytest.raises(SpecError, match="would not arrive") as refused:
            Notify.parse(changed)
        assert "T0KEN" not in str(refused.value)


def prefect_yaml() -> dict[str, Any]:
    content = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())
    assert isinstance(content, dict)
    return content


def unknown_keys(content: dict[str, Any]) -> list[str]:
    """The keys that Prefect would drop without a word."""

    def beyond(model: Any, given: dict[str, Any], where: str) -> list[str]:
        names = {name for key, field in model.model_fields.items() for name in (key, field.alias)}
        return [f"{where}{key}" for key in given if key not in names]

    found = beyond(known.PrefectYamlModel, content, "")
    for entry in content["deployments"]:
        found += beyond(known.DeploymentConfig, entry, "deployments.")
        found += beyond(known.WorkPoolConfig, entry["work_pool"], "work_pool.")
        found += beyond(known.ConcurrencyLimitSpec, entry["concurrency_limit"], "concurrency_limit.")
        for schedule in entry["schedules"]:
            found += beyond(known.RawScheduleConfig, schedule, "schedules.")
    return found


def test_prefect_knows_every_key_of_our_prefect_yaml() -> None:
    assert unknown_keys(prefect_yaml()) == []


def test_misspelt_key_of_prefect_yaml_is_found() -> None:
    content = prefect_yaml()
    content["deployments"][0]["concurency_limit"] = 5
    assert unknown_keys(content) == ["deployments.concurency_limit"]


def test_prefect_yaml_names_flow_of_deploy() -> None:
    assert [entry["entrypoint"] for entry in prefect_yaml()["deployments"]] == [ENTRYPOINT]


def test_wrong_schedule_has_a_next_step_in_json(project: Path) -> None:
    words = [sys.executable, "-m", "penstock", "deploy", str(project), "--cron", "0 3 * *", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Next: correct it, and run the same command again" in done.stderr
    assert json.loads(done.stdout)["error"]["next"] == "correct it, and run the same command again"


def test_page_address_is_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "http://127.0.0.1:4200/deployments/deployment/01234567-0123-0123-0123-0123456789ab"

    def done(_file: Path, _plan: Plan, _overrides: list[str], report: Callable[[str], None]) -> dict[str, Any]:
        report(f"page: {page}")
        return {"status": "done"}

    monkeypatch.setattr("penstock.flows.deploy.deploy.deploy_pipeline", done)
    told = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["deploy", "a-folder", "--cron", NIGHTLY])
    assert told.exit_code == 0 and f"page: {page}\n" in told.output
