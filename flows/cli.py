"""The `penstock` command: verbs, `--json`, and exit codes. Scripts rely on all three.

Answers go to stdout, logs and progress to stderr; with `--json` stdout holds one JSON object and nothing else, whatever user
code prints. Heavy libraries are imported inside the verbs, so that `penstock --help` and `penstock schema` answer at once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock import __version__
from penstock.errors import PenstockError, PreflightError
from penstock.flows.answer import ANSWERED, ERR, OUT, answer, print_line, print_note
from penstock.flows.options import HERE, File, FileOption, Json, Set
from penstock.machine.process import collect_rarely
from penstock.messages import run_command
from penstock.plugins import optional
from penstock.tasks.stages import StageName
from penstock.temporary import user_folder

if TYPE_CHECKING:
    from penstock.flows.spec_file import LoadedSpec

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    help="From rows in object storage to a trained, registered model: one file, one command, exact resume.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Template(StrEnum):
    """The projects `init` can make."""

    tabular = "tabular"
    images = "images"
    text = "text"
    boosted = "boosted"
    lightning = "lightning"
    ray_loop = "ray-loop"


def init(
    directory: Annotated[Path, typer.Argument(help="Folder to put it into; made if absent.")],
    template: Annotated[Template, typer.Option(help="The kind of data it trains on.")] = Template.tabular,
    as_json: Json = False,
) -> None:
    """Make a runnable project with real data."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.init import create_project

        files = create_project(directory, template.value)
        print_line(f"made {directory} with {len(files)} files; next: penstock run {directory / 'pipeline.yaml'}")
        return {"status": "done", "directory": str(directory), "files": [str(file) for file in files]}

    answer(work, as_json)


def check(file: File = HERE, overrides: Set = None, as_json: Json = False) -> None:
    """Check file, sources, recipe and resources; two rows go through the model, two batches are trained. Runs no stage."""

    def work() -> dict[str, Any]:
        loaded = _read_spec(file, overrides)
        from penstock.flows.verbs.check import check_pipeline

        return check_pipeline(loaded, print_line)

    answer(work, as_json)


def plan(file: File = HERE, overrides: Set = None, as_json: Json = False) -> None:
    """Show for each stage whether it would be reused, resumed or run, and why. It tries no batch: `check` does."""

    def work() -> dict[str, Any]:
        loaded = _read_spec(file, overrides)
        from penstock.flows.verbs.plan import plan_pipeline, show_plan

        try:
            result = plan_pipeline(loaded)
        except PenstockError as error:
            if error.result:
                show_plan(error.result, OUT)
            raise
        show_plan(result, OUT)
        return result

    answer(work, as_json, run=run_command(file, overrides or []))


def run(
    file: File = HERE,
    overrides: Set = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run instead of continuing the last one.")] = False,
    until: Annotated[StageName | None, typer.Option(help="Stop after this stage.")] = None,
    as_json: Json = False,
) -> None:
    """Run the pipeline, or continue it where it stopped."""

    def work() -> dict[str, Any]:
        loaded = _read_spec(file, overrides)
        from penstock.flows.verbs.run import run_loaded

        result = run_loaded(loaded, fresh=fresh, until=until)
        page = result["url"] or shlex.join(["penstock", "ui", str(file)])
        print_note(f"see it: {page}")
        return result

    command = run_command(file, overrides or [])
    answer(work, as_json, again=command, run=command)


def schema() -> None:
    """Print the JSON Schema of a pipeline file, for editors."""
    from penstock.flows.spec_file import schema_json

    try:
        print(schema_json(), end="")
    except PenstockError as error:
        print_note(f"penstock: {error}", style="red")
        raise typer.Exit(error.exit_code) from error


def status(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A pipeline file, or a folder that holds pipeline.yaml: lists the runs of that pipeline. Without it, all runs "
            "in the storage that pipeline.yaml in the current folder names, or in .penstock if there is no such file."
        ),
    ] = None,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """List runs, and correct in Prefect and MLflow the state of those whose process was killed."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.status import collect_status, show_status

        result = collect_status(file, overrides or [])
        show_status(result, OUT)
        return result

    answer(work, as_json)


def ui(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A pipeline file, or a folder that holds pipeline.yaml: shows the state beside it. Without it, the state in "
            "the current folder."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve the MLflow and Prefect pages of a pipeline's runs and print their addresses; Ctrl-C closes them."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.ui import serve_ui

        return serve_ui(file, print_note)

    answer(work, as_json)


def rollback(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The registered model, or NAME@ALIAS where it has several aliases.")
    ],
    file: FileOption = None,
    as_json: Json = False,
) -> None:
    """Give a model's alias back to the version before; the weights that lose it get it again by this command only."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.rollback import roll_back, show_rollback

        result = roll_back(file, name)
        show_rollback(result, OUT)
        return result

    answer(work, as_json)


_PANELS: dict[str, tuple[Callable[..., None] | str, ...]] = {
    "Start a run": (
        *(init, check, "penstock.flows.verbs.probe.command:probe"),
        *(plan, run, "penstock.flows.tune.command:tune", schema),
    ),
    "Look back at runs": (
        *(status, "penstock.flows.history.command:log", "penstock.flows.history.command:compare"),
        *(
            "penstock.flows.history.command:report",
            "penstock.flows.history.command:rows",
            ui,
            "penstock.flows.export.command:export",
        ),
    ),
    "Use models, and operate": (
        *("penstock.flows.predict.command:predict", rollback, "penstock.flows.retention.command:clean"),
        "penstock.flows.deploy.command:deploy",
    ),
}
"""The verbs in the order of the help. One that a plug-in brings is named by its place, and left out if that was deleted."""

for _panel, _verbs in _PANELS.items():
    for _verb in _verbs:
        _command = optional(_verb) if isinstance(_verb, str) else _verb
        if _command is not None:
            app.command(rich_help_panel=_panel)(_command)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Hold the options of the command itself."""
    if show:
        print(f"penstock {__version__}")
        raise typer.Exit


def _read_spec(file: Path, overrides: list[str] | None) -> LoadedSpec:
    """Load and check the file, before libraries are imported that take seconds."""
    from penstock.flows.spec_file import load_spec

    loaded = load_spec(file, overrides or [])
    loaded.project.check_start()
    return loaded


def _reopen_closed_standard_streams() -> None:
    """Open stdin, stdout or stderr on the null device if the process was started without it (`>&-`)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _set_missing_home() -> None:
    """Set HOME to a temporary folder if there is none (some containers); importing Prefect needs it."""
    try:
        Path.home()
    except RuntimeError:  # neither HOME nor an entry in passwd
        os.environ["HOME"] = str(user_folder())


def _without_warnings_as_errors() -> None:
    """Start again without PYTHONWARNINGS if it makes errors of warnings: Prefect, Ray and MLflow warn."""
    if "error" in os.environ.get("PYTHONWARNINGS", ""):
        del os.environ["PYTHONWARNINGS"]
        print("penstock: PYTHONWARNINGS is left out, since libraries warn", file=sys.stderr, flush=True)
        os.execv(sys.executable, sys.orig_argv)


def main() -> None:
    """Entry point of the `penstock` command."""
    collect_rarely()
    _reopen_closed_standard_streams()
    _without_warnings_as_errors()
    _set_missing_home()
    try:
        os.getcwd()
    except FileNotFoundError:
        ERR.print("penstock: the current folder has been deleted; go to one that exists", style="red")
        raise SystemExit(PreflightError.exit_code) from None
    try:
        app()
    except SystemExit as end:
        if end.code == 2 and "--json" in sys.argv and not ANSWERED:
            message = "the command line is wrong; what is wrong with it is on stderr"
            error = {"kind": "UsageError", "message": message, "problems": [], "next": "penstock --help"}
            print(json.dumps({"status": "failed", "error": error}), flush=True)
        raise
