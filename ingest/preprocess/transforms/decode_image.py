"""How does a column of encoded images become pixels, with the rows named that cannot be decoded?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from PIL import Image
from pydantic import PositiveInt

from penstock.config import Section
from penstock.errors import DataError, SpecError
from penstock.ingest.columns.arrays import tensor_array
from penstock.ingest.columns.extension_types import ImageType, RaggedType
from penstock.ingest.columns.images import DeepImage, Fit, ImageMode, decode_image, holds_images
from penstock.ingest.phases import phase
from penstock.ingest.preprocess.learnt import ColumnState
from penstock.ingest.preprocess.rows import Rows
from penstock.ingest.preprocess.transforms.transform import Functions, Transform
from penstock.ingest.spec import DataSpec, ImagesOptions, ValueRange
from penstock.messages import in_yaml

__all__ = ["DecodeImage", "DecodeImageOptions", "decode_images"]

Keep = Literal["pixels", "encoded", "sizes"]


class DecodeImageOptions(Section):
    """An encoded image (bytes, or a struct with `bytes`) becomes uint8 [height, width, channels], upright by its EXIF tag.

    Of files with several pictures (an animated GIF) it is the first. A label that is an image is a mask without this transform.
    Write transforms that learn before it: they learn from rows that all transforms before them have prepared.
    """

    column: str = "image"
    """The column that holds the encoded images."""
    size: tuple[PositiveInt, PositiveInt] | None = None
    """(height, width) in pixels of the result, instead of `data.images.size`. Without either, all images must have one size."""
    fit: Fit | None = None
    """`resize`, `crop` or `pad`, instead of `data.images.fit`."""
    mode: ImageMode | None = None
    """RGB gives 3 channels, L (grey) 1; instead of `data.images.mode`. `mask` gives uint8 [height, width] of the numbers in the
    file, such as palette indices: the class of each pixel. Masks are resized by the nearest pixel."""
    range: ValueRange | None = None
    """The values that become 0 and 255 of images of more than 8 bits; instead of `data.images.range`."""
    keep: Keep = "pixels"
    """Content of the cache. `pixels` is the fastest to read. `encoded` images take a tenth of the space and are decoded in
    training, with the same result. `sizes` keeps pixels of each image's own size: a batch has `image` (the pixels of all rows,
    joined), `image_offsets` and `image_shape` [rows, 3]."""


class DecodeImage(Transform[DecodeImageOptions]):
    """Encoded images to pixels."""

    Options = DecodeImageOptions
    decodes_images = True

    def __init__(self, name: str, options: DecodeImageOptions) -> None:
        super().__init__(name, options)
        self.keeps_images_encoded, self.makes_lists = options.keep == "encoded", options.keep == "sizes"

    def named(self, label: str | None) -> Sequence[str]:
        return [self.options.column]

    def names_after(self, names: Sequence[str]) -> list[str]:
        return [*names, f"{self.options.column}_shape"] if self.makes_lists else list(names)

    def apply(self, rows: Rows, fitted: Sequence[ColumnState], data: DataSpec, functions: Functions) -> None:
        options = self.options
        self.require(rows, [options.column])
        own = options.model_dump(include={"size", "fit", "mode", "range"}, exclude_none=True)
        images = data.images.model_copy(update=own)
        if self.keeps_images_encoded and images.range is not None:
            raise SpecError(
                "preprocess: decode_image: keep: encoded is for images of 8 bits a channel, and range for others",
                next_step="leave keep out: pixels scaled by a range take a byte each; or leave the range out",
            )
        if self.keeps_images_encoded and (images.fit != "resize" or options.mode == "mask"):
            raise SpecError(
                f"preprocess: decode_image: keep: encoded is for images in colour or grey that are resized, not for "
                f"{'a mask' if options.mode == 'mask' else f'fit: {images.fit}'}",
                next_step="leave keep out",
            )
        decode_images(rows, options.column, images, keep=options.keep, is_mask=options.mode == "mask")


def decode_images(rows: Rows, name: str, images: ImagesOptions, *, keep: Keep = "pixels", is_mask: bool = False) -> None:
    """Decode column `name` of `rows` in place; rows whose image is missing or broken are rejected.

    Args:
        images: size, mode and range of the pixels.
        keep: `encoded`: decode to know that it can be done, and keep the images as they are, as `ImageType`; `sizes`: keep each
            image's own size, as a list of its pixels and a column of shapes.
        is_mask: the numbers of the pixels are classes.

    Raises:
        DataError: the column does not hold images, or images of more than 8 bits a channel without `range`, or of several
            sizes without `size`.
    """
    size = images.size
    column = rows.column(name)
    if holds_images(column.type):
        rows.reject(column.is_null().to_numpy(zero_copy_only=False), "null", name)
        column = rows.column(name).field("bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise DataError(
            f"preprocess: decode_image: column {name!r} has type {column.type}; it takes bytes or a struct with `bytes`",
            next_step="leave the transform out if the column holds pixels already",
        )
    rows.reject(column.is_null().to_numpy(zero_copy_only=False), "null", name)
    encoded, mode = [value.as_buffer() for value in column if value.is_valid], "mask" if is_mask else images.mode
    channels = () if is_mask else (3 if images.mode == "RGB" else 1,)
    # Images of one size are decoded into their final place.
    together = np.empty((len(encoded), *size, *channels), np.uint8) if size is not None and keep == "pixels" else None
    with phase("decode"):
        pixels, errors = _decode_all(rows, name, encoded, images, mode, together, keeps=keep != "encoded")
    rows.reject(np.array([error != "" for error in errors], np.bool_), "broken image", name, lambda row: errors[row])
    whole = [image for image in pixels if image is not None]
    if keep == "sizes":
        _put_sizes(rows, name, whole)
        return
    for row, image in enumerate(whole):
        if image.shape != whole[0].shape:
            height, width = whole[0].shape[:2]
            raise DataError(
                f"{rows.origin.place(row)}: the image in {name!r} is {image.shape[0]}x{image.shape[1]} (height x width), "
                f"one before it {height}x{width}",
                next_step=f"bring all to one size: decode_image: {{column: {in_yaml(name)}, size: [{height}, {width}]}}, "
                "with fit: crop or pad where proportions matter; or keep their sizes (keep: sizes)",
            )
    if keep == "encoded":
        kept = rows.column(name)
        kept = (kept.field("bytes") if holds_images(kept.type) else kept).cast(pa.large_binary())
        shape = whole[0].shape if whole else (*(size or (1, 1)), *channels)
        rows.put(name, pa.ExtensionArray.from_storage(ImageType(shape), kept))
        return
    if together is None:
        together = np.stack(whole) if whole else np.zeros((0, 1, 1, *channels), np.uint8)
    rows.put(name, tensor_array(together[: len(whole)]))


def _put_sizes(rows: Rows, name: str, pixels: list[np.ndarray]) -> None:
    """Put pixels as lists, height by width by channels, and a column of their shapes; a mask has 1 as third number."""
    if f"{name}_shape" in rows.table.column_names:
        raise DataError(f"preprocess: decode_image: there is a column {name}_shape already", next_step="rename it")
    kind = RaggedType(pa.uint8(), "packed", 0.0)
    offsets = np.cumsum([0, *(image.size for image in pixels)], dtype=np.int64)
    values = np.concatenate([image.reshape(-1) for image in pixels]) if pixels else np.zeros(0, np.uint8)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values), type=kind.storage_type)
    rows.put(name, pa.ExtensionArray.from_storage(kind, lists))
    shapes = [(*image.shape, 1)[:3] for image in pixels]
    rows.put(f"{name}_shape", tensor_array(np.array(shapes, np.int64).reshape(-1, 3)))


def _decode_all(
    rows: Rows,
    name: str,
    contents: list[Any],
    images: ImagesOptions,
    mode: ImageMode,
    together: np.ndarray | None,
    *,
    keeps: bool,
) -> tuple[list[np.ndarray | None], list[str]]:
    """Return the pixels and the error of each image. Pixels of whole images are written to `together`, one after the other."""
    pixels: list[np.ndarray | None] = []
    errors: list[str] = []
    num_whole = 0
    for content in contents:
        try:
            out = None if together is None else together[num_whole]
            image = decode_image(content, images.size, mode, images.range, images.fit, out)
            num_whole += 1
            pixels.append(image if keeps else np.broadcast_to(np.uint8(0), image.shape))  # of which only the shape takes room
            errors.append("")
        except DeepImage as error:
            raise DataError(
                f"{rows.origin.place(len(pixels))}: the image in {name!r} is of {error}; 8 bits cannot hold them",
                next_step="say which values become 0 and 255 (data.images: {range: [0, 65535]}), or decode such images in a "
                f"map_batches function: it gets the bytes in {name!r} and may return an array of any dtype",
            ) from error
        except Image.UnidentifiedImageError:  # its text names an address in memory
            pixels.append(None)
            is_sound = bytes(content[:4]) in (b"RIFF", b"fLaC", b"OggS")
            errors.append("a sound" if is_sound else "not a JPEG, PNG, BMP, WebP, TIFF or GIF image")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            pixels.append(None)
            errors.append(str(error) or type(error).__name__)
    return pixels, errors
