"""The verb `deploy` of the command: its arguments and its help."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.flows.answer import answer, print_line
from penstock.flows.options import HERE, File, Json, Set

__all__ = ["deploy"]


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
        from penstock.flows.deploy.deploy import Plan, deploy_pipeline

        plan = Plan(cron, timezone, pool, notify)
        return deploy_pipeline(file, plan, overrides or [], print_line)

    answer(work, as_json)
