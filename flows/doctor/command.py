"""The verb `doctor` of the command: its arguments and its output."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.flows.answer import answer, print_line
from penstock.flows.options import Json

__all__ = ["doctor"]


def doctor(
    storage: Annotated[str | None, typer.Option(help="Also check this storage, such as s3://bucket/prefix.")] = None,
    as_json: Json = False,
) -> None:
    """Check versions, disk, servers and storage; exit code 3 if a run would not work."""

    def work() -> dict[str, Any]:
        from penstock.flows.doctor.doctor import diagnose

        findings = []
        for finding in diagnose(storage):
            findings.append(finding)
            print_line(f"{finding.status:<4}  {finding.name}: {finding.detail}")
            if finding.fix:
                print_line(f"      -> {finding.fix}")
        healthy = all(finding.status != "fail" for finding in findings)
        return {"status": "done" if healthy else "trouble", "findings": [finding._asdict() for finding in findings]}

    answer(work, as_json, code=lambda result: 0 if result["status"] == "done" else 3)
