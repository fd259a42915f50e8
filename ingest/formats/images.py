"""How do images in class folders become rows, and how is one recognised that cannot be decoded to its end?"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any
from unicodedata import normalize

import pyarrow as pa
from PIL import Image

from penstock.errors import DataError
from penstock.ingest.columns.images import IMAGE_FORMATS, jpeg_size
from penstock.ingest.columns.unreadable import UNREADABLE
from penstock.ingest.files.listing import SourceFile
from penstock.ingest.files.opening import read_bytes, read_problem
from penstock.ingest.formats.format import Format
from penstock.ingest.formats.reader import FileFacts, Reader, looks_like
from penstock.ingest.spec import DataSpec

__all__ = ["ImageReader", "ImagesFormat", "class_of", "refuse_without_class"]


_JPEG_END = b"\xff\xd9"

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
    in_name = frozenset({"label", "path"})
    marks_unreadable = True

    def __init__(self, data: DataSpec) -> None:
        self._needs_class = data.label == "label"
        self._refuses_damage = data.invalid == "error"

    def inspect(self, file: SourceFile) -> FileFacts:
        """Check that the file is an image, whole to its end, unless damaged ones are left out where the rows are read."""
        problem = _damage(_content(file)) if self._refuses_damage else ""
        if problem:
            what = looks_like(file)
            raise DataError(
                f"{file.uri}: {problem}" + (f" (this is {what})" if what and "image" not in what else ""),
                next_step="replace or delete what is damaged, or leave it out: data.invalid: drop (quarantine lists it, too)",
            )
        if self._needs_class:
            refuse_without_class(file)
        return FileFacts(_COLUMNS, 1)

    def tables(self, file: SourceFile, schema: pa.Schema, batch_rows: int) -> Iterator[pa.Table]:
        """Yield the one row."""
        yield self.rows((file,), schema)

    def rows(self, files: Sequence[SourceFile], schema: pa.Schema) -> pa.Table:
        """Return one table of all."""
        rows = [self._row(file, schema) for file in files]
        return pa.table([pa.array([row.get(field.name) for row in rows], field.type) for field in schema], schema=schema)

    def _row(self, file: SourceFile, schema: pa.Schema) -> dict[str, Any]:
        row: dict[str, Any] = {"label": class_of(file), "path": file.name}
        if "image" in schema.names:
            row["image"] = _content(file)
            if UNREADABLE in schema.names and (problem := _damage(row["image"])):
                row[UNREADABLE] = {"column": "image", "example": problem}
        return row


def class_of(file: SourceFile) -> str | None:
    """Return the first folder below the location's root, as in torchvision's ImageFolder; None for an image at the root.

    In Unicode's composed form: macOS writes the same name decomposed.
    """
    folder, slash, _ = file.name.partition("/")
    return normalize("NFC", folder) if slash else None


def refuse_without_class(file: SourceFile) -> None:
    """Raise DataError for a file at the root, which has no label."""
    if class_of(file) is None:
        raise DataError(
            f"{file.uri}: is not in a class folder, so it has no label", next_step="move it to a folder named after its class"
        )


def _content(file: SourceFile) -> bytes:
    try:
        return read_bytes(file.uri)
    except OSError as error:
        raise read_problem(file.uri, error) from error


def _damage(content: bytes) -> str:
    """Describe the problem of an image; empty if it has none. Decodes it unless its last bytes show that it is whole."""
    if content.rstrip(b"\0\r\n ").endswith(_JPEG_END) and jpeg_size(content) is not None:
        return ""
    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            if image.format == "JPEG" and content.rstrip(b"\0\r\n ").endswith(_JPEG_END):
                return ""
            if image.format == "PNG":
                image.verify()
                return "" if b"IEND" in content[-64:] else "cut off: the PNG has no end mark"
            image.load()
    except Image.UnidentifiedImageError:
        return "not a JPEG, PNG, BMP, WebP, TIFF or GIF image"
    except Exception as error:  # Pillow lets the errors of its decoders out: struct.error, SyntaxError, ...
        return f"the image is damaged or cut off: {error}"
    return ""
