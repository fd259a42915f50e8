"""Where does a run's page go? Into the working directory; the tracked run has it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.flows.history.report import report_page
from penstock.flows.verbs.which_run import RunNames

__all__ = ["write_report"]


def write_report(file: Path | None, name: str, output: Path | None) -> dict[str, Any]:
    """Write the page of a run; returns what `penstock report --json` prints.

    Raises:
        SpecError: there is no such run.
    """
    names = RunNames(file)
    run = names.find(name)
    page = output or Path(f"{run.run}.html")
    page.write_text(report_page(names.ledger, run), encoding="utf-8")
    return {"status": "done", "run": run.run, "page": str(page)}
