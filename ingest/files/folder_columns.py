"""Which columns are in the folders' names? `month=2011-01/part-0.parquet` has a column `month`, as in Spark, Hive and Ray."""

from __future__ import annotations

from urllib.parse import unquote

from penstock.ingest.files.listing import SourceFile

__all__ = ["folder_columns"]


_NULL = "__HIVE_DEFAULT_PARTITION__"


def folder_columns(file: SourceFile) -> dict[str, str | None]:
    """Column to value, as text, of every `name=value` folder between the location's root and the file."""
    pairs = (part.partition("=") for part in file.name.split("/")[:-1])
    return {name: None if value == _NULL else unquote(value) for name, sign, value in pairs if name and sign}
