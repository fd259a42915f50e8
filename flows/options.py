"""Arguments that several verbs of the command take."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["HERE", "File", "FileOption", "Json", "RunName", "Set", "can_be_written"]


File = Annotated[
    Path, typer.Argument(help="The pipeline file, or a folder that holds pipeline.yaml.", show_default="this folder")
]
HERE = Path()
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Use this value, not the file's, as in train.epochs=3; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; all else goes to stderr.")]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run: its id or a part of it, last, previous, best, or a version of its model (3, models:/name/3).",
    ),
]
FileOption = Annotated[
    Path | None,
    typer.Option("--file", help="The pipeline file, or a folder that holds pipeline.yaml.", show_default="this folder"),
]


def can_be_written(page: Path | None) -> Path | None:
    """Refuse a file that cannot be made, before the work that fills it."""
    if page is not None and page.is_dir():
        raise typer.BadParameter(f"{str(page)!r} is a folder; name a file in it")
    if page is not None and not page.parent.is_dir():
        folder = shlex.quote(str(page.parent))
        raise typer.BadParameter(f"{str(page)!r} lies in a folder that does not exist; first: mkdir -p {folder}")
    return page
