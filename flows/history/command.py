"""The verbs of the command that look back at runs: `log`, `compare`, `report` and `rows`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.flows.answer import OUT, answer, print_line
from penstock.flows.options import HERE, File, FileOption, Json

__all__ = ["RunName", "compare", "log", "report", "rows"]

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run: its id or a part of it, last, previous, best, or a version of its model (3, models:/name/3).",
    ),
]


def log(file: File = HERE, as_json: Json = False) -> None:
    """List a pipeline's runs by date, with changes, outcome, metric and error."""

    def work() -> dict[str, Any]:
        from penstock.flows.history.log import collect_log, show_log

        result = collect_log(file)
        show_log(result, OUT)
        return result

    answer(work, as_json)


def compare(before: RunName, after: RunName = "last", file: FileOption = None, as_json: Json = False) -> None:
    """Compare two runs: spec, code, data, and metrics on the same rows."""

    def work() -> dict[str, Any]:
        from penstock.flows.history.comparison import compare_runs, show_comparison

        result = compare_runs(file, before, after)
        show_comparison(result, OUT)
        return result

    answer(work, as_json)


def report(name: RunName = "last", file: FileOption = None, as_json: Json = False) -> None:
    """Write one page of a run that needs no network: data, stages, losses, throughput, figures, environment."""

    def work() -> dict[str, Any]:
        from penstock.flows.history.report import report_page
        from penstock.flows.history.which_run import RunNames

        names = RunNames(file)
        run = names.find(name)
        page = Path(f"{run.run}.html")
        page.write_text(report_page(names.ledger, run), encoding="utf-8")
        print_line(str(page))
        return {"status": "done", "run": run.run, "page": str(page)}

    answer(work, as_json)


def rows(
    name: RunName,
    step: Annotated[int, typer.Option(help="The optimizer step; the first is 1.")],
    file: FileOption = None,
    as_json: Json = False,
) -> None:
    """List the rows a step of a run trained on: file, line and values."""

    def work() -> dict[str, Any]:
        from penstock.flows.history.rows import rows_of_step, show_rows

        result = rows_of_step(file, name, step)
        show_rows(result, OUT)
        return result

    answer(work, as_json)
