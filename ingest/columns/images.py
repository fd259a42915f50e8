"""How does an encoded image become pixels? Upright by its EXIF tag, of one size and one number of channels."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

if TYPE_CHECKING:
    pass


__all__ = ["decode_image", "holds_images"]


def holds_images(kind: pa.DataType) -> bool:
    """Whether the type is that of encoded images as Parquet files keep them: a struct with the field `bytes`."""
    return bool(pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def decode_image(content: bytes | memoryview, size: tuple[int, int] | None, mode: Literal["RGB", "L"]) -> np.ndarray:
    """Decode to uint8 [height, width, channels]; channels is 3 for RGB and 1 for L.

    Args:
        size: (height, width) in pixels to resize to, bilinear; None keeps the image's own.

    Raises:
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: not an image, or a damaged one.
    """
    with Image.open(io.BytesIO(content)) as image:
        upright = ImageOps.exif_transpose(image).convert(mode)
        if size is not None and upright.size != (size[1], size[0]):
            upright = upright.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        pixels = np.asarray(upright, np.uint8)
    return pixels.reshape(*pixels.shape[:2], -1)
