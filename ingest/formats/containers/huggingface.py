"""How is a dataset read that Hugging Face's `save_to_disk` has written? Its Arrow streams are those that its state names.

Other Arrow files beside them, which `map` and `filter` keep as caches, hold the same rows again or others.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import read_bytes
from penstock.ingest.formats.arrow import ArrowReader
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts
from penstock.ingest.spec import DataSpec

__all__ = ["HuggingFaceFormat", "HuggingFaceReader"]


class HuggingFaceFormat(Format):
    """A dataset as `save_to_disk` of Hugging Face's datasets writes it, one split a folder; class labels stay integers."""

    extensions = (".arrow",)
    folder_columns = False

    def reader(self, data: DataSpec, options: None) -> HuggingFaceReader:
        """Read the files that the folder's state names."""
        return HuggingFaceReader()


class HuggingFaceReader(ArrowReader):
    """Arrow streams; a file that `state.json` beside it does not name has no rows."""

    def inspect(self, file: SourceFile) -> FileFacts:
        """Read every batch, since only the batches know their row counts."""
        facts = super().inspect(file)
        return facts if _is_data(file) else facts._replace(rows=0)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the rows, a record batch at a time."""
        if _is_data(file):
            yield from super().tables(file, schema, batch_rows)


def _is_data(file: SourceFile) -> bool:
    folder, name = posixpath.split(file.uri)
    try:
        state: dict[str, Any] = json.loads(read_bytes(f"{folder}/state.json"))
        data, indices = [each["filename"] for each in state["_data_files"]], state.get("_indices_data_files")
    except FileNotFoundError as error:
        raise DataError(
            f"{folder}: there is no state.json, so this is not a dataset that save_to_disk has written",
            next_step="write it by datasets' save_to_disk, or read the files as they are: data.format: arrow",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}/state.json is damaged: {error}", next_step="write the dataset again by save_to_disk"
        ) from error
    if indices:
        raise DataError(
            f"{folder}: the dataset keeps a selection of its rows apart ({indices})",
            next_step="write it again after dataset.flatten_indices()",
        )
    return name in data
