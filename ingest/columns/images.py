"""How does an encoded image become pixels? Upright by its EXIF tag, of one size and one number of channels."""

from __future__ import annotations

import io
from typing import Literal

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

__all__ = ["DeepImage", "Fit", "ImageMode", "decode_image", "holds_images"]


_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "JPEG2000", "PPM")
"""What is decoded. Pillow knows more, some of which start other programs (an EPS starts Ghostscript)."""

ImageMode = Literal["RGB", "L", "mask"]
"""Colour, grey, or the numbers in the file as they are: the class of each pixel."""

Fit = Literal["resize", "crop", "pad"]
"""How an image comes to a size of other proportions."""

_MASK_MODES = ("1", "L", "P")
"""Pillow's modes whose pixels are one number of 8 bits at most: a palette's index, where there is a palette."""

_DEEP_MODES = ("I", "F")
"""Pillow's modes of more than 8 bits a channel begin so; it cuts their values off at 0 and 255 when it converts them."""


class DeepImage(ValueError):
    """An image with more than 8 bits a channel, whose values would not survive."""


def holds_images(kind: pa.DataType) -> bool:
    """Whether the type is that of encoded images as Parquet files keep them: a struct with the field `bytes`."""
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def decode_image(
    content: bytes | memoryview,
    size: tuple[int, int] | None,
    mode: ImageMode,
    value_range: tuple[float, float] | None = None,
    fit: Fit = "resize",
) -> np.ndarray:
    """Decode the first picture of a file to uint8 [height, width, channels]; channels is 3 for RGB and 1 for L.

    A `mask` has no channels: [height, width].

    Args:
        size: (height, width) in pixels to come to, bilinear (of a mask the nearest pixel); None keeps the image's own.
        value_range: what becomes 0 and 255 of an image with more than 8 bits; values beyond are clipped.
        fit: `resize` to the size whatever the proportions; or keep these, and `crop` what is too much on two sides, or `pad`
            what lacks with zeros.

    Raises:
        DeepImage: its pixels have more than 8 bits a channel, or are floats, and no range is given for them.
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: not an image, or a damaged one.
    """
    with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
        _refuse_stack(image)
        if mode == "mask":
            if image.mode not in _MASK_MODES:
                raise ValueError(f"a mask holds one number of 8 bits a pixel, and this is of Pillow's mode {image.mode}")
            # Of mode 1, whose white is 255, the two classes are 0 and 1.
            upright = ImageOps.exif_transpose(image)
            upright = Image.fromarray(np.asarray(upright).astype(np.uint8))
        elif image.mode.startswith(_DEEP_MODES):
            if value_range is None:
                raise DeepImage(f"Pillow's mode {image.mode}: its pixels have more than 8 bits, or are floats")
            upright = _in_8_bits(ImageOps.exif_transpose(image), *value_range).convert(mode)
        else:
            upright = ImageOps.exif_transpose(image).convert(mode)
        if size is not None and upright.size != (size[1], size[0]):
            upright = _fitted(upright, size, fit, Image.Resampling.NEAREST if mode == "mask" else Image.Resampling.BILINEAR)
        pixels = np.asarray(upright, np.uint8)
    return pixels if mode == "mask" else pixels.reshape(*pixels.shape[:2], -1)


def _fitted(image: Image.Image, size: tuple[int, int], fit: Fit, resampling: Image.Resampling) -> Image.Image:
    height, width = size
    if fit == "crop":
        return ImageOps.fit(image, (width, height), resampling)
    if fit == "pad":
        return ImageOps.pad(image, (width, height), resampling, color=0)
    return image.resize((width, height), resampling)


def _refuse_stack(image: Image.Image) -> None:
    """A TIFF of several pages of one size is a stack or a film, of which one page is not the picture; others are previews."""
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    if pages > 1:
        size = image.size
        image.seek(1)
        same = image.size == size
        image.seek(0)
        if same:
            raise ValueError(f"a TIFF of {pages} pages of one size: write each as a file of its own")


def _in_8_bits(image: Image.Image, low: float, high: float) -> Image.Image:
    """A grey image of 8 bits: `low` and less is black, `high` and more is white."""
    values = np.asarray(image, np.float64)
    if np.isnan(values).any():
        raise ValueError("a pixel is NaN")
    scaled = (np.clip(values, low, high) - low) * (255.0 / (high - low))
    return Image.fromarray(np.rint(scaled).astype(np.uint8))
