"""The verb `clean` of the command: its arguments and its help."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.flows.answer import answer, print_line
from penstock.flows.options import HERE, File, Json

__all__ = ["clean"]


def clean(
    file: File = HERE,
    keep_runs: Annotated[
        int | None, typer.Option(min=1, help="How many of the newest runs keep their data.", show_default="5")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(min=0, max=36_500, help="Days after which even these lose their data.", show_default="30")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Free what no kept run, alias or live run uses: checkpoints, prepared rows, answers. Records of runs stay."""

    def work() -> dict[str, Any]:
        from penstock.flows.retention.clean import clean_pipeline

        return clean_pipeline(file, keep_runs, keep_days, dry_run=dry_run, report=print_line)

    answer(work, as_json)
