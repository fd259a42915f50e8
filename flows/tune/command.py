"""The verb `tune` of the command. Servers up, flow called in this process, and its end turned into a result or an error."""

from __future__ import annotations

import shlex
from pathlib import Path
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
        result = _make_sweep(file, overrides or [], fresh)
        page = result["url"] or shlex.join(["penstock", "ui", str(file)])
        print_note(f"see the trials: {page}")
        return result

    command = run_command(file, overrides or [], verb="tune")
    answer(work, as_json, again=command, run=command)


def _make_sweep(file: Path, overrides: list[str], fresh: bool) -> dict[str, Any]:
    from penstock.flows.preflight.checks import Preflight
    from penstock.flows.spec_file import load_spec
    from penstock.flows.tune.space import check_space
    from penstock.flows.verbs.run import perform_flow

    loaded = load_spec(file, overrides)
    preflight = Preflight(loaded)
    preflight.ahead()
    check_space(loaded)

    def perform() -> Any:
        from penstock.flows.run.request import RunRequest
        from penstock.flows.tune.flow import tune as tune_flow

        request = RunRequest(file=str(loaded.file), overrides=overrides, fresh=fresh).made_here(preflight)
        return tune_flow(request, return_state=True)

    return perform_flow(loaded.spec.name, loaded.state_dir, perform)
