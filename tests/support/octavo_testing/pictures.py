"""Encoded images with a known colour in their upper left quarter, in every form that an image of a prompt may have."""

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

Colour = tuple[int, int, int]
RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
#: How a camera stores an upright image for each EXIF orientation.
_STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def quarter(corner: Colour, rest: Colour = GREEN, size: tuple[int, int] = (48, 32)) -> Image.Image:
    """Return an image whose upper left quarter has one colour, and the rest another."""
    image = Image.new("RGB", size, rest)
    image.paste(corner, (0, 0, size[0] // 2, size[1] // 2))
    return image


def encoded(image: Image.Image, form: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def oriented(image: Image.Image, orientation: int, form: str = "JPEG", **options: object) -> bytes:
    """Encode an image as a camera stores it, with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    method = _STORED[orientation]
    return encoded(image if method is None else image.transpose(method), form, exif=exif, **options)


def deep_png(values: np.ndarray, clear: int | None = None) -> bytes:
    """Encode 16-bit values, grey [height, width] or RGB [height, width, 3]. `clear`: the grey that is transparent."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, 0 if values.ndim == 2 else 2, 0, 0, 0)
    transparency = [] if clear is None else [(b"tRNS", struct.pack(">H", clear))]
    return png([(b"IHDR", header), *transparency, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")])


def png(chunks: list[tuple[bytes, bytes]]) -> bytes:
    parts = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def empty_png(width: int, height: int, rows: int | None = None) -> bytes:
    """Encode black pixels, 1 bit each, that compress to a thousandth. `rows`: those that the data has."""
    data = zlib.compress(b"\0" * ((1 + (width + 7) // 8) * (height if rows is None else rows)), 9)
    return png([(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")])


def forms(corner: Colour) -> dict[str, bytes]:
    """Return the picture `quarter(corner)` in each form. The rest is white where transparency makes it so."""
    image = quarter(corner)
    clear = Image.new("RGBA", image.size, (*GREEN, 0))
    clear.paste((*corner, 255), (0, 0, image.width // 2, image.height // 2))
    # An adaptive palette, of which the colour of the rest is transparent.
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=2)
    other = Image.new("RGB", image.size, GREEN)
    lossless = {"lossless": True, "save_all": True, "append_images": [other], "duration": 100}
    return {
        "png": encoded(image, "PNG"),
        **{f"jpeg {i}": oriented(image, i, quality=95, subsampling=0) for i in _STORED},
        "png with orientation 6": oriented(image, 6, "PNG"),
        "webp with orientation 8": oriented(image, 8, "WEBP", lossless=True),
        "palette": encoded(palette, "PNG"),
        "palette, transparent": encoded(palette, "PNG", transparency=palette.getpixel((47, 31))),
        "16-bit rgb": deep_png(np.asarray(image).astype(np.uint16) * 257),
        "cmyk": encoded(image.convert("CMYK"), "JPEG", quality=95),
        "rgba on white": encoded(clear, "PNG"),
        "webp": encoded(image, "WEBP", lossless=True),
        "gif": encoded(image, "GIF"),
        "animated gif": encoded(image, "GIF", save_all=True, append_images=[other], duration=100),
        "animated webp": encoded(image, "WEBP", **lossless),
    }


def grey_forms(corner: Colour) -> dict[str, bytes]:
    """Return the picture in the forms that have no colours. `corner`: black or white; the rest is the other."""
    rest = WHITE if corner == BLACK else BLACK
    grey = quarter(corner, rest).convert("L")
    deep = np.asarray(grey).astype(np.uint16) * 257
    return {
        "grey": encoded(grey, "PNG"),
        "1-bit": encoded(grey.convert("1"), "PNG"),
        "16-bit": deep_png(deep),
        "grey jpeg": encoded(grey, "JPEG"),
    }
