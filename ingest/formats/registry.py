"""Which reader reads a pipeline's format?"""

from __future__ import annotations

from collections.abc import Callable

from penstock.ingest.formats.arrow import ArrowReader
from penstock.ingest.formats.csv import CsvReader
from penstock.ingest.formats.images import ImageReader
from penstock.ingest.formats.json import JsonReader
from penstock.ingest.formats.parquet import ParquetReader
from penstock.ingest.formats.reader import Reader
from penstock.ingest.formats.text import TextReader
from penstock.ingest.spec import DataSpec

__all__ = ["reader_of"]


_READERS: dict[str, Callable[[DataSpec], Reader]] = {
    "parquet": lambda data: ParquetReader(),
    "arrow": lambda data: ArrowReader(),
    "csv": CsvReader,
    "json": JsonReader,
    "images": ImageReader,
    "text": TextReader,
}


def reader_of(data: DataSpec) -> Reader:
    """The reader of `data.format`, with the options of `data`."""
    return _READERS[data.format](data)
