"""The verb `export` of the command: its arguments and its output."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.flows.answer import ERR, answer, print_line
from penstock.flows.history.command import RunName
from penstock.flows.options import FileOption, Json

__all__ = ["export"]


class Format(StrEnum):
    """Formats of the files."""

    parquet = "parquet"
    arrow = "arrow"


def export(
    name: RunName,
    output: Annotated[str, typer.Option(help="Folder or URL to write to, empty or of this export, as s3://bucket/prefix.")],
    format: Annotated[Format, typer.Option(help="Format of the files; arrow is Arrow IPC.")] = Format.parquet,
    file: FileOption = None,
    as_json: Json = False,
) -> None:
    """Write the prepared rows of a run for other tools: files by split, and a manifest last."""

    def work() -> dict[str, Any]:
        from penstock.flows.export.export import export_rows

        result = export_rows(file, name, output, format.value, lambda line: ERR.print(line))
        print_line(f"{result['output']}: {result['rows']:,} rows in {len(result['files']):,} files, and {result['manifest']}")
        return result

    answer(work, as_json)
