"""Which columns are in the folders' names? `month=2011-01/part-0.parquet` has a column `month`, as in Spark, Hive and Ray."""

from __future__ import annotations

from urllib.parse import unquote

from penstock.ingest.files.listing import SourceFile

__all__ = ["folder_columns", "folder_type", "values_in_folders"]


_NULL = "__HIVE_DEFAULT_PARTITION__"


def folder_columns(file: SourceFile) -> dict[str, str | None]:
    """Map column to value, as text, of every `name=value` folder between the location's root and the file."""
    return values_in_folders(file.name)


def folder_type(file: SourceFile, column: str) -> str:
    """Return the type of a column in the folders' names, as text: string, unless the file's table declares another."""
    return dict(file.folder_types).get(column, "string")


def values_in_folders(name: str) -> dict[str, str | None]:
    """As `folder_columns`, of a path below the root."""
    pairs = (part.partition("=") for part in name.split("/")[:-1])
    return {name: None if value == _NULL else unquote(value) for name, sign, value in pairs if name and sign}
