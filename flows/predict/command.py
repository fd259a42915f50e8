"""The verb `predict` of the command. Servers up, flow called in this process, and its end turned into a result or an error."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.flows.answer import answer, print_note
from penstock.flows.options import FileOption, Json
from penstock.messages import counted

__all__ = ["predict"]


def predict(
    model: Annotated[str, typer.Argument(help="models:/NAME@ALIAS, models:/NAME/VERSION, a run, or the folder of a model.")],
    source: Annotated[
        str, typer.Argument(metavar="INPUT", help="A file, a folder, a glob, or a URL of one; a table, a query, a function.")
    ],
    output: Annotated[str, typer.Option(help="Folder or URL for the scored rows, as Parquet; made if absent.")],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--column", metavar="NAME", help="A column of INPUT to keep beside the predictions; repeatable.", show_default="all"
        ),
    ] = None,
    format: Annotated[str | None, typer.Option(help="Format of INPUT.", show_default="that of what was trained on")] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="NAME=VALUE",
            help="An option of INPUT's format, as under data.FORMAT, such as version=12; repeatable.",
            show_default="as trained with",
        ),
    ] = None,
    gpus: Annotated[bool, typer.Option("--gpus", help="Score on the cluster's GPUs, one for each process.")] = False,
    file: FileOption = None,
    as_json: Json = False,
) -> None:
    """Score rows with a registered model; what is scored already, in this output by this model, is not scored again."""

    def work() -> dict[str, Any]:
        from penstock.flows.predict.request import PredictRequest, state_folder
        from penstock.flows.servers.services import check_mlflow_answers, prepare_environment
        from penstock.flows.spec_file import option_values
        from penstock.flows.verbs.run import perform_flow

        request = PredictRequest(
            model=model,
            input=source,
            output=output,
            columns=columns or [],
            format=format,
            options=option_values(options or []),
            gpus=gpus,
            state_dir=str(state_folder(file)),
        )
        prepare_environment()
        check_mlflow_answers()

        def perform() -> Any:
            from penstock.flows.predict.flow import predict as predict_flow

            return predict_flow(request, return_state=True)

        result = perform_flow(model, Path(request.state_dir), perform)
        print_note(f"{result['output']}: {counted(result['total_rows'], 'row')}")
        return result

    answer(work, as_json, again=shlex.join(["penstock", *sys.argv[1:]]))
