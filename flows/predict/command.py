"""The verb `predict` of the command: its arguments and its help."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer

from penstock.flows.answer import answer, print_note
from penstock.flows.options import Columns, FileOption, Format, Gpus, Json, Options
from penstock.messages import counted

__all__ = ["predict"]


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
        from penstock.flows.predict.verb import predict as predict_rows

        result = predict_rows(
            model, source, output, columns=columns or [], format=format, options=options or [], gpus=gpus, file=file
        )
        print_note(f"{result['output']}: {counted(result['total_rows'], 'row')}")
        return result

    answer(work, as_json, again=shlex.join(["penstock", *sys.argv[1:]]))
