"""The verb `tune` of the command: its arguments and its help."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from penstock.flows.answer import answer, print_note
from penstock.flows.options import HERE, File, Json, Set
from penstock.messages import run_command

__all__ = ["tune"]


def tune(
    file: File = HERE,
    overrides: Set = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new sweep instead of continuing the last one.")] = False,
    as_json: Json = False,
) -> None:
    """Try other values of some keys, as the section `tune` says, or continue; the best becomes a pipeline file and a model."""

    def work() -> dict[str, Any]:
        from penstock.flows.tune.verb import make_sweep

        result = make_sweep(file, overrides or [], fresh=fresh)
        page = result["url"] or shlex.join(["penstock", "ui", str(file)])
        print_note(f"see the trials: {page}")
        return result

    command = run_command(file, overrides or [], verb="tune")
    answer(work, as_json, again=command, run=command)
