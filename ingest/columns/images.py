"""How does an encoded image become pixels? Upright by its EXIF tag, of one size and one number of channels.

Equal pixels everywhere: Pillow decodes, torch resizes, and a plain JPEG goes through simplejpeg, which calls the library that
Pillow calls, and gives the same pixels in two thirds of the time. The versions of all three are part of the keys.
"""

from __future__ import annotations

import io
import struct
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import simplejpeg
from PIL import ExifTags, Image, ImageFile, ImageOps

from penstock.plugins import needed

__all__ = [
    "DEEP_MODES",
    "IMAGE_FORMATS",
    "DeepImage",
    "Fit",
    "ImageMode",
    "decode_image",
    "holds_images",
    "pixel_bytes",
    "upright",
]

IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF")
"""By name: Pillow knows more, some of which start other programs (an EPS starts Ghostscript)."""

ImageMode = Literal["RGB", "L", "mask"]
"""Colour, grey, or the numbers in the file as they are: the class of each pixel."""

Fit = Literal["resize", "crop", "pad"]
"""How an image comes to a size of other proportions."""

_MASK_MODES = ("1", "L", "P")
"""Pillow's modes whose pixels are one number of 8 bits at most: a palette's index, where there is a palette."""

_PNG_BITS_AT, _PNG_COLOUR_AT = 24, 25
"""Where a PNG has the number of bits of a channel, and whether it is grey (0)."""

_TIFF_BITS, _TIFF_PHOTOMETRIC = 258, 262
"""Tags of a TIFF: the bits of each channel; whether 0 is white (0) or black (1)."""

_SHRINK_FROM = 2
"""A JPEG is decoded at a half, quarter or eighth of its size if that is so many times the size to come to, on both sides: the
coefficients left out would show in no pixel, and a camera's picture takes a sixteenth of the time and memory."""

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"

_SAYS_HOW_IT_LIES = (b"Exif", b"Orientation")
"""Words that a JPEG holds which may have to be turned; by chance among the pixels they only cost time."""

_PLAIN_COLORS = {"RGB": "YCbCr", "L": "Gray"}
"""What a JPEG holds that needs no other conversion than its own."""

_MANY_PIXELS = Image.MAX_IMAGE_PIXELS or 0
"""From here on Pillow warns, and then refuses."""

DEEP_MODES = ("I", "F")
"""Pillow's modes of more than 8 bits a channel begin so; it cuts their values off at 0 and 255 when it converts them."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By the number of the orientation in EXIF; 1 is upright."""

_DEEP_TIMES = 4
"""So many times the memory of other images one with more than 8 bits a channel takes while it is decoded."""


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
    out: np.ndarray | None = None,
    *,
    is_whole: bool = False,
) -> np.ndarray:
    """Decode the first picture of a file to uint8 [height, width, channels]; channels is 3 for RGB and 1 for L.

    A `mask` has no channels: [height, width].

    Args:
        size: (height, width) in pixels to come to, bilinear over all pixels that one covers (of a mask the nearest pixel);
            None keeps the image's own.
        value_range: what becomes 0 and 255 of an image with more than 8 bits; values beyond are clipped.
        fit: `resize` to the size whatever the proportions; or keep these, and `crop` what is too much on two sides, or `pad`
            what lacks with zeros.
        out: uint8 of the shape that comes of `size` and `mode`, which is filled and returned in place of a new array.
        is_whole: whether the file was decoded before; else a JPEG whose data end early is refused, and a PNG whose checksums
            are wrong or whose end mark lacks: Pillow decodes both.

    Raises:
        DeepImage: its pixels have more than 8 bits a channel, or are floats, and no range is given for them.
        OSError, ValueError, SyntaxError, Image.DecompressionBombError: not an image, or a damaged one.
    """
    if fit == "resize" and mode != "mask" and (plain := _plain_jpeg(content, size, mode)) is not None:
        return _put(plain, out) if size is None or plain.shape[:2] == tuple(size) else _resized(plain, size, out)
    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            _refuse_stack(image)
            if not is_whole:
                _refuse_cut_jpeg(content)
                _refuse_broken_png(content)
            if mode == "mask":
                classes = Image.fromarray(_mask_numbers(image, content))
                return _put(np.asarray(classes if size is None else _fitted(classes, size, fit, Image.Resampling.NEAREST)), out)
            if _is_deep(image, content):
                if value_range is None:
                    raise DeepImage(f"Pillow's mode {image.mode}: its pixels have more than 8 bits a channel, or are floats")
                in_8_bits = needed("penstock.ingest.columns.deep.values:in_8_bits", "an image of more than 8 bits")
                turned = in_8_bits(image, content, *value_range).convert(mode)
            else:
                if size is not None:
                    _decode_smaller(image, *size)
                turned = upright(image)
                turned = turned if turned.mode == mode else turned.convert(mode)
            if size is not None and fit != "resize":
                turned = _fitted(turned, size, fit, Image.Resampling.BILINEAR)
            pixels = np.array(turned)  # writable, as torch wants it
    except (struct.error, TypeError, LookupError, ArithmeticError) as error:  # which Pillow's decoders let out, too
        raise OSError(f"damaged: {type(error).__name__}: {error}") from error
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    return _put(pixels, out) if size is None or pixels.shape[:2] == tuple(size) else _resized(pixels, size, out)


def _is_deep(image: ImageFile.ImageFile, content: bytes | memoryview) -> bool:
    """Whether an image that is open, and not loaded, has more than 8 bits a channel by the header of its file."""
    if image.mode.startswith(DEEP_MODES):
        return True
    if image.format == "PNG":
        return content[_PNG_BITS_AT] > 8
    bits: Any = getattr(image, "tag_v2", {}).get(_TIFF_BITS, (1,))
    return max(bits) > 8


def upright(image: Image.Image) -> Image.Image:
    """Turn an image by its orientation alone. Pillow's function also writes the EXIF anew, which fails for odd values."""
    image.load()
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image if turn is None else image.transpose(turn)


def _refuse_cut_jpeg(content: bytes | memoryview) -> None:
    """Raise OSError for a JPEG whose data end before its picture does; bytes too many are common, and change nothing."""
    data = bytes(content)
    if data.startswith(_JPEG):
        try:
            simplejpeg.decode_jpeg(data, "GRAY", min_height=1, min_width=1, min_factor=8)  # an eighth of the size: quicker
        except ValueError as error:
            if "premature end" in str(error):
                raise OSError(str(error)) from error


def _refuse_broken_png(content: bytes | memoryview) -> None:
    """Raise OSError for a PNG with a wrong checksum or without its end mark; bytes after that mark change nothing."""
    if content[: len(_PNG)] == _PNG:
        try:
            with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
                image.verify()
        except (OSError, SyntaxError) as error:
            raise OSError(f"the PNG is damaged or ends early: {error}") from error


def _mask_numbers(image: ImageFile.ImageFile, content: bytes | memoryview) -> np.ndarray:
    """Return the numbers in a mask's file, upright: uint8 [height, width]. Pillow scales those of few bits, and inverts some.

    Raises:
        ValueError: its pixels are not one number of 8 bits at most.
    """
    if image.mode not in _MASK_MODES:
        raise ValueError(f"a mask holds one number of 8 bits a pixel, and this is of Pillow's mode {image.mode}")
    tags: Any = getattr(image, "tag_v2", {})
    inverted = tags.get(_TIFF_PHOTOMETRIC) == 0 and image.mode != "P"
    is_grey_png = image.format == "PNG" and content[_PNG_COLOUR_AT] == 0
    bits = content[_PNG_BITS_AT] if is_grey_png else tags.get(_TIFF_BITS, (8,))[0] if image.mode == "L" else 8
    white = 1 if image.mode == "1" else 255
    values = np.asarray(upright(image)).astype(np.uint8)
    values = white - values if inverted else values
    return values // (255 // (2**bits - 1)) if 1 < bits < 8 else values


def _put(pixels: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return pixels
    out[...] = pixels
    return out


def _plain_jpeg(content: bytes | memoryview, size: tuple[int, int] | None, mode: ImageMode) -> np.ndarray | None:
    """Decode a JPEG that Pillow would decode at its full size and not turn.

    None for all others, and for those that are damaged, which Pillow may read all the same.
    """
    data = bytes(content)
    if not data.startswith(_JPEG):
        return None
    if any(word in data for word in _SAYS_HOW_IT_LIES):
        return None
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
        shrinks = size is not None and min(height // size[0], width // size[1]) >= 2 * _SHRINK_FROM
        if shrinks or colors != _PLAIN_COLORS[mode] or height * width > _MANY_PIXELS:
            return None
        pixels: np.ndarray = simplejpeg.decode_jpeg(data, "RGB" if mode == "RGB" else "GRAY")
    except ValueError:
        return None
    return pixels


def pixel_bytes(content: bytes | memoryview) -> int:
    """Return bytes that the first picture of a file takes while it is decoded, by its header; 0 if the format is unknown."""
    try:
        with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
            return 4 * image.width * image.height * (_DEEP_TIMES if _is_deep(image, content) else 1)
    except Exception:  # of any class, from a decoder of Pillow; decoding the image reports it
        return 0


def _decode_smaller(image: Image.Image, height: int, width: int) -> None:
    """Let a JPEG be decoded at a part of its size. Does nothing to other formats."""
    is_turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    image.draft(None, (_SHRINK_FROM * (height if is_turned else width), _SHRINK_FROM * (width if is_turned else height)))


def _resized(pixels: np.ndarray, size: tuple[int, int], out: np.ndarray | None) -> np.ndarray:
    """Resize uint8 [height, width, channels]: as Pillow does it, or one off, in a third of the time."""
    # Seconds, which other pipelines do without.
    import torch

    rows = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
    resized = torch.nn.functional.interpolate(rows, size=tuple(size), mode="bilinear", antialias=True)
    planes = resized[0].numpy()
    resized_pixels = np.empty((*size, len(planes)), np.uint8) if out is None else out
    for channel, plane in enumerate(planes):  # a fourth of the time of one copy of them all
        resized_pixels[..., channel] = plane
    return resized_pixels


def _fitted(image: Image.Image, size: tuple[int, int], fit: Fit, resampling: Image.Resampling) -> Image.Image:
    height, width = size
    if fit == "crop":
        return ImageOps.fit(image, (width, height), resampling)
    if fit == "pad":
        return ImageOps.pad(image, (width, height), resampling, color=0)
    return image.resize((width, height), resampling)


def _refuse_stack(image: Image.Image) -> None:
    """Refuse a TIFF of several pages of one size: a stack or a film, not a picture. Pages of other sizes are previews."""
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    if pages > 1:
        size = image.size
        image.seek(1)
        same = image.size == size
        image.seek(0)
        if same:
            raise ValueError(f"a TIFF of {pages} pages of one size: write each as a file of its own")
