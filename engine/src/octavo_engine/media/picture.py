"""Reads the size of images from their headers, and their pixels as RGB, with Pillow, which is an optional package.

Only four formats are opened, because Pillow starts other programs for some (Ghostscript for EPS). Pillow's own
conversion to RGB would turn 16-bit images white and reveal the colours of transparent pixels, so `_to_rgb` has a rule
for each pixel format. EXIF orientation is applied. The first frame of an animation is used.
"""

import logging
import math
import struct
import warnings
import zlib
from collections.abc import Iterator
from io import BytesIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from octavo_engine.media.placeholders import MAX_PIXELS
from octavo_engine.wire.errors import InvalidRequest

_LOGGER = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_SIDE = 65_535
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_DEEP = "I;16"
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
#: For each pass of an interlaced PNG: x and y of its first pixel, and its steps in x and y.
_PNG_PASSES = (
    *((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8)),
    *((2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)),
)
_INFLATE_BYTES = 1 << 20
#: Most reads of a file that Pillow may make before the pixels: it makes about three for each part of a header.
_MAX_READS = 2048
#: Pillow would log a line for each damaged EXIF entry, and keep the text; an image may have 65 535 of them.
warnings.filterwarnings("ignore", module=r"PIL\.")


def read_size(data: bytes, where: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return width and height of the upright image, without decoding it. Raises InvalidRequest."""
    with _open(data, where, max_pixels) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def decode(data: bytes, where: str, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Return the pixels: [height, width, 3], bytes. Raises InvalidRequest."""
    with _open(data, where, max_pixels) as image:
        size, orientation = image.size, _orientation(image)
        try:
            if image.format == "PNG":
                _check_png_rows(data)
            image.load()
            rgb = _to_rgb(image)
        except Exception as error:
            raise _unreadable(where, error) from error
        if image.size != size:
            raise _unreadable(where, ValueError(f"its header says {size}, but its pixels are {image.size}"))
        return np.asarray(_turn_upright(rgb, orientation))


def to_png(image: object, where: str, max_pixels: int = MAX_PIXELS) -> bytes:
    """Encode a PIL image, or a uint8 array of shape [height, width(, channels)], as PNG. Raises InvalidRequest."""
    if isinstance(image, np.ndarray):
        image = _from_array(image, where)
    if not isinstance(image, Image.Image):
        message = f"{where} must be a PIL image or an array of bytes, got {type(image).__name__}."
        raise InvalidRequest(message, param=where)
    _check_size(image.size, where, max_pixels)
    buffer = BytesIO()
    try:
        _turn_upright(_to_rgb(image), _orientation(image)).save(buffer, "PNG", compress_level=1)
    except Exception as error:
        raise _unreadable(where, error) from error
    return buffer.getvalue()


class _ImageFile(BytesIO):
    """The bytes of a file. The number of reads is limited: Pillow reads each of a header's parts, maybe millions."""

    reads_left: float = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads_left -= 1
        if self.reads_left < 0:
            raise ValueError(f"its header has too many parts, which take more than {_MAX_READS} reads")
        return super().read(size)


def _open(data: bytes, where: str, max_pixels: int) -> Image.Image:
    file = _ImageFile(data)
    try:
        image = Image.open(file, formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(where, f"{error}", max_pixels) from error
    except UnidentifiedImageError as error:
        known = "PNG, JPEG, WebP and GIF"
        message = f"{where} is in no format that is supported, or its header is damaged: send one of {known}."
        raise InvalidRequest(message, param=where) from error
    except Exception as error:
        raise _unreadable(where, error) from error
    file.reads_left = math.inf
    try:
        _check_size(image.size, where, max_pixels)
    except InvalidRequest:
        image.close()
        raise
    return image


def _check_size(size: tuple[int, int], where: str, max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels or max(size) > MAX_SIDE:
        raise _too_large(where, f"it has {width} x {height} pixels", max_pixels)
    if min(size) < 1:
        raise InvalidRequest(f"{where} has {width} x {height} pixels: send an image that has some.", param=where)


def _too_large(where: str, reason: str, max_pixels: int) -> InvalidRequest:
    limits = f"the limit is {max_pixels} pixels and {MAX_SIDE} a side"
    message = f"{where} is too large: {reason}; {limits}: send a smaller image, or raise --max-image-pixels."
    return InvalidRequest(message, param=where)


def _unreadable(where: str, error: Exception) -> InvalidRequest:
    reason = str(error) or type(error).__name__
    return InvalidRequest(f"{where} cannot be decoded: {reason:.200}: send an undamaged file.", param=where)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, if it precedes the pixels in the file: for a PNG, `image.getexif` would decode the
    pixels."""
    try:
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:
        _LOGGER.debug("the EXIF data of an image cannot be read", exc_info=True)
        return 1


def _turn_upright(image: Image.Image, orientation: int) -> Image.Image:
    method = _UPRIGHT.get(orientation)
    return image if method is None else image.transpose(method)


def _check_png_rows(data: bytes) -> None:
    """Raise ValueError if a PNG has fewer rows than its header states: Pillow would leave the missing ones black."""
    width, height, depth, colour = struct.unpack_from(">IIBB", data, 16)
    passes = _PNG_PASSES if data[28] else ((0, 0, 1, 1),)
    wanted = 0
    for left, top, across, down in passes:
        columns, rows = -(-max(width - left, 0) // across), -(-max(height - top, 0) // down)
        wanted += rows * (1 + (columns * depth * _PNG_CHANNELS[colour] + 7) // 8) if columns else 0
    found, inflater = 0, zlib.decompressobj()
    for chunk in _png_data(data):
        while chunk and found < wanted:
            found += len(inflater.decompress(chunk, _INFLATE_BYTES))
            chunk = inflater.unconsumed_tail
    if found < wanted:
        raise ValueError(f"its header announces {wanted} bytes of pixels, but it has {found}")


def _png_data(data: bytes) -> Iterator[bytes]:
    start = 8
    while start + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, start)
        if name == b"IDAT":
            yield data[start + 8 : start + 8 + length]
        start += length + 12


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert to RGB: 16-bit values keep their upper byte, and transparent parts become white."""
    if image.mode in ("I", "F"):
        raise ValueError(f"the mode {image.mode} states no range of values, so convert it to RGB")
    if image.mode.startswith(_DEEP):
        image = _from_deep(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    white.alpha_composite(image.convert("RGBA"))
    return white.convert("RGB")


def _from_deep(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey, of which one value may be transparent."""
    values = np.asarray(image)
    grey = Image.fromarray((values >> 8).astype(np.uint8))
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey.putalpha(Image.fromarray(np.where(values == clear, 0, 255).astype(np.uint8)))
    return grey


def _from_array(array: np.ndarray, where: str) -> Image.Image:
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or channels not in (1, 3, 4) or not array.size:
        message = (
            f"{where} is an array of {array.dtype} with the shape {array.shape}: pass bytes (uint8) in the shape "
            "[height, width] or [height, width, channels], with 1, 3 or 4 channels."
        )
        raise InvalidRequest(message, param=where)
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and channels == 1 else array)
