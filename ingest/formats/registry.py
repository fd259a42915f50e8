"""Which formats are there, and what reads a pipeline's files?"""

from __future__ import annotations

from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import Reader
from penstock.ingest.spec import DataSpec
from penstock.installed import version_of
from penstock.plugins import Plugins

__all__ = ["FORMATS", "format_named", "format_of", "format_origin", "format_versions", "reader_of"]

_CONTAINERS = "penstock.ingest.formats.containers"

_SOURCES = "penstock.ingest.formats.sources"

FORMATS: Plugins[type[Format]] = Plugins(
    "format",
    "penstock.formats",
    {
        "parquet": "penstock.ingest.formats.parquet:ParquetFormat",
        "csv": "penstock.ingest.formats.csv:CsvFormat",
        "json": "penstock.ingest.formats.json:JsonFormat",
        "arrow": "penstock.ingest.formats.arrow:ArrowFormat",
        "images": "penstock.ingest.formats.images:ImagesFormat",
        "text": "penstock.ingest.formats.text:TextFormat",
        "huggingface": f"{_CONTAINERS}.huggingface:HuggingFaceFormat",
        "webdataset": f"{_CONTAINERS}.webdataset:WebDatasetFormat",
        "numpy": f"{_CONTAINERS}.numpy:NumpyFormat",
        "excel": f"{_CONTAINERS}.excel:ExcelFormat",
        "orc": f"{_CONTAINERS}.orc:OrcFormat",
        "avro": f"{_CONTAINERS}.avro:AvroFormat",
        "audio": f"{_CONTAINERS}.audio:AudioFormat",
        "tfrecord": f"{_CONTAINERS}.tfrecord:TFRecordFormat",
        "delta": f"{_SOURCES}.delta:DeltaFormat",
        "iceberg": f"{_SOURCES}.iceberg:IcebergFormat",
        "lance": f"{_SOURCES}.lance:LanceFormat",
        "sql": f"{_SOURCES}.sql:SqlFormat",
        "python": f"{_SOURCES}.python:PythonFormat",
    },
    needs=("extensions", "Options", "listing", "reader"),
)
"""Name in `data.format` to the format's class."""


def format_named(name: str) -> Format:
    """Return the format of that name.

    Raises:
        SpecError: the name is unknown; the message lists the known ones.
        PreflightError: its package cannot be imported, or adds something other than a format.
    """
    return FORMATS.get(name)()


def format_of(data: DataSpec) -> Format:
    """Return the format of `data.format`. Raises as `format_named`."""
    return format_named(data.format)


def format_origin(data: DataSpec) -> str | None:
    """Return `distribution==version` of the package that adds `data.format`, for keys; None for a format of penstock itself."""
    return FORMATS.origin(data.format)


def format_versions(data: DataSpec) -> dict[str, str]:
    """Distribution -> version here, of what decides how the files of `data.format` are read, besides pyarrow; for keys."""
    return {name: version_of(name) for name in format_of(data).libraries}


def reader_of(data: DataSpec, format: str | None = None) -> Reader:
    """Return the reader of `data.format`, with its options. Raises as `format_named`.

    Args:
        format: read the files as another format than that of `data`, with its default options.
    """
    name = data.format if format is None else format
    found = format_named(name)
    if found.Options is None:
        return found.reader(data, None)
    return found.reader(data, data.__dict__[name] if name in data.__dict__ else found.Options())
