"""How do images in class folders become rows?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any
from unicodedata import normalize

import pyarrow as pa

from penstock.errors import DataError
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import read_bytes, read_problem
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader
from penstock.ingest.spec import DataSpec

__all__ = ["ImageReader", "ImagesFormat"]

_COLUMNS = {"image": pa.binary(), "label": pa.string(), "path": pa.string()}


class ImagesFormat(Format):
    """One image a file, in folders named after their classes: the first folder below the root, at any depth."""

    extensions = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif")
    # The folders of images are their classes, whatever signs are in the names.
    folder_columns = False
    # One picture in two folders is still one picture: held out and trained on, it would leak.
    identity = ("image",)
    encoded_images = ("image",)
    not_features = ("path",)

    def reader(self, data: DataSpec, options: None) -> ImageReader:
        """Read a file a row."""
        return ImageReader(data)


class ImageReader(Reader):
    """One row per image file: `image` (its bytes), `label` (its class folder's name, null at the root) and `path`."""

    one_row_per_file = True
    inspects_rows = False
    in_name = frozenset({"label", "path"})

    def __init__(self, data: DataSpec) -> None:
        self._needs_class = data.label == "label"

    def inspect(self, file: SourceFile) -> FileFacts:
        """Check the file's folder. Whether it is a whole image is found when it is decoded."""
        if self._needs_class and _class_of(file) is None:
            raise DataError(
                f"{file.uri}: is not in a class folder, so it has no label",
                next_step="move it to a folder named after its class",
            )
        return FileFacts(_COLUMNS, 1)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the one row."""
        yield self.rows((file,), schema)

    def rows(self, files: Sequence[SourceFile], schema: pa.Schema) -> pa.Table:
        """Return one table of all."""
        rows = [{"label": _class_of(file), "path": file.name, **self.content(file, schema.names)} for file in files]
        return pa.table([pa.array([row.get(field.name) for row in rows], field.type) for field in schema], schema=schema)

    def content(self, file: SourceFile, names: Collection[str]) -> dict[str, Any]:
        """Return the columns that are in the file, if they are among those to read."""
        try:
            return {"image": read_bytes(file.uri)} if "image" in names else {}
        except OSError as error:
            raise read_problem(file.uri, error) from error


def _class_of(file: SourceFile) -> str | None:
    """Return the first folder below the location's root, as in torchvision's ImageFolder; None for an image at the root.

    In Unicode's composed form: macOS writes the same name decomposed.
    """
    folder, slash, _ = file.name.partition("/")
    return normalize("NFC", folder) if slash else None
