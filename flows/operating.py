"""The verbs of the command that operate a project: roll back, clean, deploy, diagnose."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.flows.answer import OUT, answer, print_line
from penstock.flows.options import HERE, File, FileOption, Json, Set

__all__ = ["clean", "deploy", "doctor", "rollback"]


def rollback(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The registered model, or NAME@ALIAS where it has several aliases.")
    ],
    file: FileOption = None,
    as_json: Json = False,
) -> None:
    """Give a model's alias back to the version that held it before; later runs leave it there until they train a better one."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.rollback import roll_back, show_rollback

        result = roll_back(file, name)
        show_rollback(result, OUT)
        return result

    answer(work, as_json)


def clean(
    file: File = HERE,
    keep_runs: Annotated[
        int | None, typer.Option(min=1, help="How many of the newest runs keep their data.", show_default="5")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(min=0, help="Days after which even these runs lose their data.", show_default="30")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Free what no kept run, alias or live run uses: checkpoints, prepared rows, answers. Records of runs stay."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.clean import clean_pipeline

        return clean_pipeline(file, keep_runs, keep_days, dry_run=dry_run, report=print_line)

    answer(work, as_json)


def deploy(
    cron: Annotated[str, typer.Option(help='When to run, as "minute hour day month weekday".')],
    file: File = HERE,
    timezone: Annotated[str, typer.Option(help="Time zone of --cron, such as Europe/Berlin.")] = "UTC",
    pool: Annotated[str, typer.Option(help="Prefect work pool that runs it; made, of type process, if absent.")] = "penstock",
    overrides: Set = None,
    notify: Annotated[
        str | None,
        typer.Option(
            help="Send a message when a run fails: URL of a webhook or of Apprise (mail, other services); `none` ends it.",
            show_default="as it was",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a Prefect deployment of the pipeline, on a schedule."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.deploy.deploy import Plan, deploy_pipeline

        plan = Plan(cron, timezone, pool, notify)
        return deploy_pipeline(file, plan, overrides or [], print_line)

    answer(work, as_json)


def doctor(
    storage: Annotated[str | None, typer.Option(help="Also check this storage, such as s3://bucket/prefix.")] = None,
    as_json: Json = False,
) -> None:
    """Check versions, disk, servers and storage; exit code 3 if a run would not work."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.doctor import diagnose

        findings = []
        for finding in diagnose(storage):
            findings.append(finding)
            print_line(f"{finding.status:<4}  {finding.name}: {finding.detail}")
            if finding.fix:
                print_line(f"      -> {finding.fix}")
        healthy = all(finding.status != "fail" for finding in findings)
        return {"status": "done" if healthy else "trouble", "findings": [finding._asdict() for finding in findings]}

    answer(work, as_json, code=lambda result: 0 if result["status"] == "done" else 3)
