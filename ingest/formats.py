"""Which reader reads a pipeline's format?"""

from __future__ import annotations

from collections.abc import Callable

from penstock.ingest.columnar import ArrowReader, ParquetReader
from penstock.ingest.delimited import CsvReader
from penstock.ingest.image_files import ImageReader
from penstock.ingest.json_lines import JsonReader
from penstock.ingest.reader import Reader
from penstock.ingest.spec import DataSpec
from penstock.ingest.text_files import TextReader

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
