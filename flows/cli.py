"""The `penstock` command: verbs, `--json`, and exit codes. Scripts rely on all three.

Answers go to stdout, logs and progress to stderr; with `--json` stdout holds one JSON object and nothing else, whatever user
code prints. Heavy libraries are imported inside the verbs, so that `penstock --help` and `penstock schema` answer at once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock import __version__
from penstock.errors import PenstockError, PreflightError, SpecError
from penstock.flows.answer import ANSWERED, ERR, OUT, answer, say, tell
from penstock.flows.looking_back import compare, explain, log, report, rows, status
from penstock.flows.options import HERE, Columns, File, FileOption, Format, Gpus, Json, Options, Set
from penstock.machine.garbage import collect_rarely
from penstock.messages import counted, run_command
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


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Folder to put it into; made if absent.")],
    template: Annotated[Template, typer.Option(help="The kind of data it trains on.")] = Template.tabular,
    as_json: Json = False,
) -> None:
    """Make a runnable project with real data."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.init import create_project

        files = create_project(directory, template.value)
        say(f"made {directory} with {len(files)} files; next: penstock run {directory / 'pipeline.yaml'}")
        return {"status": "done", "directory": str(directory), "files": [str(file) for file in files]}

    answer(work, as_json)


@app.command()
def check(file: File = HERE, overrides: Set = None, as_json: Json = False) -> None:
    """Check spec, sources, recipe and resources with one real batch; runs no stage."""

    def work() -> dict[str, Any]:
        loaded = _read_spec(file, overrides)
        from penstock.flows.verbs.check import check_pipeline

        return check_pipeline(loaded, say)

    answer(work, as_json)


@app.command()
def probe(file: File = HERE, overrides: Set = None, as_json: Json = False) -> None:
    """Measure how fast rows reach the workers and where the time goes; names values of the file to try with --set."""

    def work() -> dict[str, Any]:
        loaded = _read_spec(file, overrides)
        from penstock.flows.verbs.probe.probe import probe_pipeline

        return probe_pipeline(loaded, say)

    answer(work, as_json)


@app.command()
def plan(file: File = HERE, overrides: Set = None, as_json: Json = False) -> None:
    """Say for each stage whether it would be reused, resumed or run, and which input differs. It ends as `run` would."""

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


@app.command()
def run(
    file: File = HERE,
    overrides: Set = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new run instead of continuing the last one.")] = False,
    until: Annotated[StageName | None, typer.Option(help="Stop after this stage.")] = None,
    folds: Annotated[bool, typer.Option("--folds", help="Train once for each of data.folds, and compare.")] = False,
    as_json: Json = False,
) -> None:
    """Run the pipeline, or continue it where it stopped."""

    def work() -> dict[str, Any]:
        if folds:
            return _folds(file, overrides or [], fresh=fresh, until=until)
        loaded = _read_spec(file, overrides)
        from penstock.flows.verbs.run import run_loaded

        result = run_loaded(loaded, fresh=fresh, until=until)
        page = result["url"] or shlex.join(["penstock", "ui", str(file)])
        tell(f"see it: {page}")
        if result.get("list_url"):
            tell(f"all runs: {result['list_url']}")
        return result

    command = run_command(file, overrides or [], *(["--folds"] if folds else []))
    answer(work, as_json, again=command, run=command)


def _folds(file: Path, overrides: list[str], *, fresh: bool, until: str | None) -> dict[str, Any]:
    from penstock.flows.verbs.tune import tune as tune_pipeline

    if until is not None:
        raise SpecError("--until stops one run, and --folds makes several", next_step="leave one of them out")
    result = tune_pipeline(file, overrides, fresh=fresh, folds=True)
    page = result["url"] or shlex.join(["penstock", "ui", str(file)])
    tell(f"see the folds: {page}")
    return result


@app.command()
def tune(
    file: File = HERE,
    overrides: Set = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin a new sweep instead of continuing the last one.")] = False,
    as_json: Json = False,
) -> None:
    """Try other values of some keys, as the section `tune` says, or continue; the best becomes a pipeline file and a model."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.tune import tune as tune_pipeline

        result = tune_pipeline(file, overrides or [], fresh=fresh)
        page = result["url"] or shlex.join(["penstock", "ui", str(file)])
        tell(f"see the trials: {page}")
        return result

    command = run_command(file, overrides or [], verb="tune")
    answer(work, as_json, again=command, run=command)


for _verb in (status, log, compare, rows, report, explain):
    app.command()(_verb)


@app.command()
def rollback(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The registered model, or NAME@ALIAS where it has several aliases.")
    ],
    file: FileOption = None,
    as_json: Json = False,
) -> None:
    """Give a model's alias back to the version that held it before; later runs leave it there until they train a better one."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.model.rollback import roll_back, show_rollback

        result = roll_back(file, name)
        show_rollback(result, OUT)
        return result

    answer(work, as_json)


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION, a run, or the folder of a model.")],
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="A file, a folder, a glob, or a URL of one; a table, a query, a function.")
    ],
    output: Annotated[str, typer.Option(help="Folder or URL for the scored rows, as Parquet; made if absent.")],
    columns: Columns = None,
    format: Format = None,
    options: Options = None,
    gpus: Gpus = False,
    file: FileOption = None,
    as_json: Json = False,
) -> None:
    """Score rows with a registered model; what is scored already, in this output by this model, is not scored again."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.model.predict import predict as predict_rows

        result = predict_rows(
            model, source, output, columns=columns or [], format=format, options=options or [], gpus=gpus, file=file
        )
        tell(f"{result['output']}: {counted(result['total_rows'], 'row')}")
        return result

    answer(work, as_json, again=shlex.join(["penstock", *sys.argv[1:]]))


@app.command()
def ui(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A pipeline file, or a folder that holds pipeline.yaml: shows the state beside it. Without it, the state in "
            "the current folder."
        ),
    ] = None,
    mlflow_port: Annotated[int, typer.Option(help="Port of the MLflow page on 127.0.0.1; 0 picks a free one.")] = 0,
    as_json: Json = False,
) -> None:
    """Serve the MLflow and Prefect pages of a pipeline's runs and print their addresses; Ctrl-C closes them."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.ui import serve_ui

        return serve_ui(file, mlflow_port, tell)

    answer(work, as_json)


@app.command()
def clean(
    file: File = HERE,
    keep_runs: Annotated[
        int | None, typer.Option(min=1, help="How many of the newest runs keep their data.", show_default="5")
    ] = None,
    keep_days: Annotated[
        float | None, typer.Option(min=0, help="Days after which even one of these goes.", show_default="30")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be freed.")] = False,
    as_json: Json = False,
) -> None:
    """Free what no kept run, alias or live run uses: checkpoints, prepared rows, answers. Records of runs stay."""

    def work() -> dict[str, Any]:
        _read_spec(file, None, to_train=False)
        from penstock.flows.verbs.clean import clean_pipeline

        return clean_pipeline(file, keep_runs, keep_days, dry_run=dry_run, say=say)

    answer(work, as_json)


@app.command()
def deploy(
    cron: Annotated[str, typer.Option(help='When to run, as "minute hour day month weekday".')],
    file: File = HERE,
    timezone: Annotated[str, typer.Option(help="Time zone of --cron, such as Europe/Berlin.")] = "UTC",
    pool: Annotated[str, typer.Option(help="Prefect work pool that runs it; made, of type process, if absent.")] = "penstock",
    overrides: Set = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Score --input with the pipeline's model instead of training it.")
    ] = False,
    source: Annotated[str | None, typer.Option("--input", help="With --predict: what to score.")] = None,
    output: Annotated[str | None, typer.Option(help="With --predict: folder or URL for the scored rows.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --predict: which model.", show_default="the one of the file's register section, by its alias"),
    ] = None,
    columns: Columns = None,
    format: Format = None,
    options: Options = None,
    gpus: Gpus = False,
    notify: Annotated[
        str | None,
        typer.Option(
            help="Send a message when a run fails or none begins for a day: URL of a webhook, or of Apprise for mail and "
            "other services; `none` ends it.",
            show_default="as it was",
        ),
    ] = None,
    silence_h: Annotated[
        float | None,
        typer.Option("--silence-h", help="With --notify: hours without a run.", show_default="25, on a schedule of every day"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a Prefect deployment of the pipeline, or of predictions by its model, on a schedule."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.deploy.deploy import Plan, deploy_pipeline, deploy_predictions

        plan = Plan(cron, timezone, pool, notify, silence_h)
        if not predict:
            if source or output or model or columns or format or options or gpus:
                raise SpecError("--input, --output, --model, --column, --format, --option and --gpus go with --predict")
            return deploy_pipeline(file, plan, overrides or [], say)
        if source is None or output is None or overrides:
            raise SpecError("--predict needs --input and --output, and takes no --set")
        from penstock.flows.verbs.model.predict import predict_request

        request = partial(
            predict_request,
            source=source,
            output=output,
            columns=columns or [],
            format=format,
            options=options or [],
            gpus=gpus,
            file=file,
        )
        return deploy_predictions(file, plan, model, request, say)

    answer(work, as_json)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a pipeline file, for editors."""
    from penstock.flows.spec_file import schema_json

    try:
        print(schema_json(), end="")
    except PenstockError as error:
        tell(f"penstock: {error}", style="red")
        raise typer.Exit(error.exit_code) from error


@app.command()
def doctor(
    storage: Annotated[str | None, typer.Option(help="Also check this storage, such as s3://bucket/prefix.")] = None,
    as_json: Json = False,
) -> None:
    """Check versions, servers, ports, credentials and disks; exit code 3 on trouble."""

    def work() -> dict[str, Any]:
        from penstock.flows.verbs.doctor import diagnose, show_findings

        findings = diagnose(storage)
        show_findings(findings, OUT)
        healthy = all(finding.status != "fail" for finding in findings)
        return {"status": "done" if healthy else "trouble", "findings": [finding.model_dump() for finding in findings]}

    answer(work, as_json, code=lambda result: 0 if result["status"] == "done" else 3)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Hold the options of the command itself."""
    if show:
        print(f"penstock {__version__}")
        raise typer.Exit


def _read_spec(file: Path, overrides: list[str] | None, *, to_train: bool = True) -> LoadedSpec:
    """Load the file, and report what is wrong with it before libraries are loaded that take seconds."""
    from penstock.flows.spec_file import load_spec

    loaded = load_spec(file, overrides or [])
    if to_train:
        loaded.project.check_start()
    return loaded


def _open_what_is_closed() -> None:
    """A process may be started with stdin, stdout or stderr closed (`>&-`); whatever is opened next would take its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def _have_a_home() -> None:
    """Of a user without a home folder, as in some containers, a temporary one is: Prefect cannot be imported without."""
    try:
        Path.home()
    except RuntimeError:  # neither HOME nor an entry in passwd
        os.environ["HOME"] = str(user_folder())


def main() -> None:
    """Entry point of the `penstock` command."""
    collect_rarely()
    _open_what_is_closed()
    _have_a_home()
    try:
        os.getcwd()
    except FileNotFoundError:
        ERR.print("penstock: the current folder has been deleted; go to one that exists", style="red")
        raise SystemExit(PreflightError.exit_code) from None
    # The command reports by itself; Prefect's log lines go to its server only. A default: a user's own setting wins.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    try:
        app()
    except SystemExit as end:
        if end.code == 2 and "--json" in sys.argv and not ANSWERED:
            message = "the command line is wrong; what is wrong with it is on stderr"
            error = {"kind": "UsageError", "message": message, "problems": [], "next": "penstock --help"}
            print(json.dumps({"status": "failed", "error": error}), flush=True)
        raise
