"""Arguments that several verbs of the command take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["HERE", "File", "FileOption", "Json", "Set"]

File = Annotated[
    Path, typer.Argument(help="The pipeline file, or a folder that holds pipeline.yaml.", show_default="this folder")
]
HERE = Path()
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Use this value, not the file's, as in train.epochs=3; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; all else goes to stderr.")]
FileOption = Annotated[
    Path | None,
    typer.Option("--file", help="The pipeline file, or a folder that holds pipeline.yaml.", show_default="this folder"),
]
