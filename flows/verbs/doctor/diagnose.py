"""Would a run work here, and if not, what is the next command? `penstock doctor` looks at the machine and its servers.

Every check runs in a thread of its own under one deadline: a server that accepts a connection and never answers is a finding,
not a hanging doctor.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from penstock.flows.servers.nodes import ANSWER_S
from penstock.flows.servers.probes import ray_address
from penstock.flows.verbs.doctor import machine as doctor_machine
from penstock.flows.verbs.doctor import servers as doctor_servers
from penstock.flows.verbs.doctor.finding import Finding, fail
from penstock.messages import said_of
from penstock.redact import redact_text
from penstock.storage import Storage
from penstock.stores import is_local

__all__ = ["Check", "diagnose", "show_findings"]


DEADLINE_S = 60.0
"""For all checks together, since they run side by side; S3 clients take up to 40 s to give up on an endpoint."""

Check = tuple[str, Callable[[], list[Finding]]]
"""(name, function): what is looked at, and what looks."""

_STYLE = {"ok": "green", "warn": "yellow", "fail": "red"}


def diagnose(storage_uri: str | None, environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Look at everything a run would need.

    Args:
        storage_uri: a storage to try as well; None checks the disk of the current directory.
        environ: the settings to judge; None takes the process's own.
    """
    settings = dict(os.environ if environ is None else environ)
    findings = run_checks(_checks(storage_uri, settings))
    blocked = any(finding.status == "fail" and finding.name.startswith(("RAY_", "storage ")) for finding in findings)
    if ray_address(settings) is not None and not blocked:
        # By themselves: Ray changes the folder of the whole process while it connects.
        storage = None if storage_uri is None else Storage(storage_uri)
        findings += run_checks([("Ray nodes", lambda: doctor_servers.check_nodes(storage, settings))], DEADLINE_S + ANSWER_S)
    return findings


def run_checks(checks: Sequence[Check], deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Run all checks side by side; the findings come in the order of the checks. A check that raises or hangs is a finding."""
    results: dict[int, list[Finding]] = {}

    def run(index: int, name: str, look: Callable[[], list[Finding]]) -> None:
        try:
            results[index] = look()
        except Exception as error:  # the doctor itself must survive whatever it looks at
            results[index] = [fail(name, f"the check itself failed: {said_of(error)}", "report this")]

    threads = [threading.Thread(target=run, args=(index, *check), daemon=True) for index, check in enumerate(checks)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    silent = "check that it runs and that no firewall drops the connection"
    return [
        finding
        for index, (name, _) in enumerate(checks)
        for finding in results.get(index) or [fail(name, f"no answer within {deadline_s:g} s", silent)]
    ]


def show_findings(findings: Sequence[Finding], console: Console) -> None:
    """One line per finding, its fix below it, and a sum."""
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        mark = f"[{_STYLE[finding.status]}]{finding.status:<4}[/]"
        console.print(f"{mark}  ", end="")
        console.print(f"{finding.name:<{width}}  {finding.detail}", markup=False, soft_wrap=True)
        if finding.fix:
            console.print(f"{'':<{width + 8}}-> {finding.fix}", markup=False, soft_wrap=True)
    counts = {status: sum(finding.status == status for finding in findings) for status in _STYLE}
    console.print(f"{counts['ok']} ok, {counts['warn']} to watch, {counts['fail']} in the way", markup=False)


def _checks(storage_uri: str | None, environ: dict[str, str]) -> list[Check]:
    where = "." if storage_uri is None else storage_uri
    checks: list[Check] = [
        ("python", lambda: [doctor_machine.check_python()]),
        ("libraries", doctor_machine.check_libraries),
        ("prefect server", lambda: [doctor_machine.check_prefect_server()]),
        ("torch", lambda: [doctor_machine.check_torch()]),
        ("disk", lambda: doctor_machine.check_disks(where if is_local(where) else ".")),
        ("shared memory", lambda: [doctor_machine.check_shared_memory()]),
        ("telemetry", lambda: [doctor_machine.check_telemetry(environ)]),
        ("PREFECT_API_URL", lambda: [doctor_servers.check_prefect(environ)]),
        ("MLFLOW_TRACKING_URI", lambda: [doctor_servers.check_mlflow(environ)]),
        ("RAY_ADDRESS", lambda: [doctor_servers.check_ray(environ)]),
        ("RAY_AUTH_MODE", lambda: [doctor_servers.check_ray_auth(environ)]),
    ]
    if storage_uri is not None:
        checks.append((f"storage {redact_text(where)}", lambda: doctor_servers.check_storage(Storage(where), environ)))
    return checks
