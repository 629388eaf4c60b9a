"""Images of every form become upright RGB pixels; damaged, unknown and too large ones are refused."""

import struct
import subprocess
import sys
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from octavo_engine.media.picture import decode, read_size, to_png
from octavo_engine.media.placeholders import MAX_PIXELS
from octavo_engine.wire.errors import InvalidRequest
from octavo_testing.pictures import (
    BLACK,
    BLUE,
    GREEN,
    RED,
    WHITE,
    deep_png,
    empty_png,
    encoded,
    forms,
    grey_forms,
    oriented,
    png,
    quarter,
)
from PIL import Image

CASES = [(RED, forms(RED)), (BLUE, forms(BLUE)), (BLACK, grey_forms(BLACK)), (WHITE, grey_forms(WHITE))]
CLEAR = ("palette, transparent", "rgba on white")


@pytest.mark.parametrize(
    ("corner", "name", "data"), [(corner, name, data) for corner, made in CASES for name, data in made.items()]
)
def test_each_form_shows_the_upright_picture(corner: tuple[int, int, int], name: str, data: bytes) -> None:
    pixels = decode(data, "image")
    assert (pixels.shape, pixels.dtype) == ((32, 48, 3), np.uint8)
    assert read_size(data, "image") == (48, 32)
    rest = WHITE if name in CLEAR else {BLACK: WHITE, WHITE: BLACK}.get(corner, GREEN)
    wanted = np.asarray(quarter(corner, rest)).astype(int)
    inner = np.s_[2:14, 2:22], np.s_[18:, 26:], np.s_[2:14, 26:], np.s_[18:, 2:22]  # JPEG blurs edges
    for part in inner:
        assert abs(pixels[part].astype(int) - wanted[part]).max() <= 12, name


def test_a_picture_without_loss_keeps_each_byte() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 9, 3)).astype(np.uint8)
    assert (decode(encoded(Image.fromarray(pixels), "PNG"), "image") == pixels).all()
    assert (decode(to_png(pixels, "image"), "image") == pixels).all()


def test_16_bit_values_keep_their_upper_byte_and_their_transparent_value() -> None:
    values = np.array([[0, 255, 256, 32_768, 65_535]], np.uint16)
    assert decode(deep_png(values), "image")[0, :, 0].tolist() == [0, 0, 1, 128, 255]
    assert decode(deep_png(values, clear=256), "image")[0, :, 0].tolist() == [0, 0, 255, 128, 255]


def test_half_transparent_pixels_are_blended_with_white() -> None:
    half = Image.new("RGBA", (2, 1), (0, 0, 0, 128))
    assert abs(int(decode(encoded(half, "PNG"), "image")[0, 0, 0]) - 127) <= 1


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I;16"])
def test_a_pil_image_of_each_mode_becomes_the_same_picture(mode: str) -> None:
    white = Image.new("RGB", (4, 3), WHITE)
    made = Image.fromarray(np.full((3, 4), 65_535, np.uint16)) if mode == "I;16" else white.convert(mode)
    assert made.mode == mode
    assert decode(to_png(made, "image"), "image").tolist() == np.asarray(white).tolist()


def test_a_pil_image_is_turned_upright() -> None:
    image = Image.open(BytesIO(oriented(quarter(RED), 6)))
    assert image.size == (32, 48)
    pixels = decode(to_png(image, "image"), "image")
    assert pixels.shape == (32, 48, 3)
    assert pixels[2, 2, 0] > 240 > 15 > pixels[30, 2, 0]


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1), (3, 5, 3), (3, 5, 4), (1, 1, 3), (3, 40, 3), (40, 3, 3)])
def test_arrays_have_their_channels_last(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 255, np.uint8)
    array[0, 0] = 0
    if shape[-1] == 4:
        array[0, 0, 3] = 255
    pixels = decode(to_png(array, "image"), "image")
    assert pixels.shape == (*shape[:2], 3)
    assert pixels[0, 0].tolist() == [0, 0, 0]
    assert pixels.size == 3 or pixels[-1, -1].tolist() == [255, 255, 255]


OTHERS: dict[str, Any] = {
    "floats": np.zeros((2, 2, 3)),
    "channels first": np.zeros((3, 20, 20), np.uint8),
    "no rows": np.zeros((0, 2), np.uint8),
    "one axis": np.zeros(4, np.uint8),
    "a text": "data:image/png;base64,AAAA",
    "nothing": None,
    "32-bit floats": Image.new("F", (2, 2)),
    "32-bit integers": Image.new("I", (2, 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_objects_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_png(OTHERS[name], "multi_modal_data.image[0]")
    assert caught.value.param == "multi_modal_data.image[0]"


PNG = encoded(quarter(RED), "PNG")
JPEG = encoded(quarter(RED), "JPEG")
DAMAGED = {
    "truncated png": PNG[:-30],
    "header of a png": PNG[:40],
    "truncated jpeg": JPEG[: len(JPEG) // 2],
    "truncated webp": encoded(quarter(RED), "WEBP")[:60],
    "truncated gif": encoded(quarter(RED), "GIF")[:40],
    "more rows in the header than in the data": empty_png(40, 30, rows=20),
    "a wrong checksum": PNG[:20] + bytes([PNG[20] ^ 1]) + PNG[21:],
    "nothing": b"",
    "text": b"What is in the image?",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
    "heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(200),
    "bmp": encoded(quarter(RED), "BMP"),
    "tiff": encoded(quarter(RED), "TIFF"),
    "no pixels": png(
        [(b"IHDR", struct.pack(">IIBBBBB", 0, 5, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_other_and_damaged_files_are_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(InvalidRequest, match="send ") as caught:
        decode(DAMAGED[name], "messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"
    assert str(caught.value).startswith("messages[0].content[1] ")


LARGE = {
    "a bomb of 20 kB": empty_png(13_000, 13_000),
    "above the limit of Pillow": empty_png(20_000, 10_000),
    "one pixel more": empty_png(MAX_PIXELS // 1000 + 1, 1000),
    "a long line": empty_png(70_000, 1),
    "webp": b"RIFF\x1a\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0VP8L" + bytes(8),
    "gif": b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\xff\xff\xff\xff\0\2\2D\1\0;",
}


@pytest.mark.parametrize("name", LARGE)
def test_images_with_too_many_pixels_are_refused_by_their_header(name: str) -> None:
    assert len(LARGE[name]) < 60_000
    with pytest.raises(InvalidRequest, match=f"the limit is {MAX_PIXELS} pixels"):
        read_size(LARGE[name], "image")


def test_the_largest_image_is_accepted() -> None:
    assert read_size(empty_png(MAX_PIXELS // 1000, 1000), "image") == (MAX_PIXELS // 1000, 1000)


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (8, 8), (9, 17), (64, 33)])
@pytest.mark.parametrize("mode", ["1", "P", "RGB", "RGBA", "LA"])
def test_a_whole_png_of_each_size_is_accepted(mode: str, size: tuple[int, int]) -> None:
    assert decode(encoded(Image.new(mode, size), "PNG"), "image").shape == (size[1], size[0], 3)


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (5, 3), (8, 8), (9, 17)])
def test_an_interlaced_png_is_whole_with_the_rows_of_its_seven_passes(size: tuple[int, int]) -> None:
    """Pixels are written by the definition: (x, y) is in the pass that the 8 x 8 pattern names."""
    pattern = ["16462646", "77777777", "56565656", "77777777", "36463646", "77777777", "56565656", "77777777"]
    width, height = size
    rows = b""
    for number in "1234567":
        for y in range(height):
            columns = [x for x in range(width) if pattern[y % 8][x % 8] == number]
            rows += b"\0" + bytes(10 * x + y for x in columns) if columns else b""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 1)
    whole, cut = (
        png([(b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]) for data in (rows, rows[:-1])
    )
    assert decode(whole, "image")[:, :, 0].tolist() == [[10 * x + y for x in range(width)] for y in range(height)]
    with pytest.raises(InvalidRequest, match=f"announces {len(rows)} bytes of pixels, but it has {len(rows) - 1}"):
        decode(cut, "image")


def test_an_orientation_behind_the_pixels_of_a_png_counts_neither_for_its_size_nor_for_its_pixels() -> None:
    data = oriented(quarter(RED), 6, "PNG")
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    late = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    assert read_size(late, "image") == (32, 48)
    assert decode(late, "image").shape == (48, 32, 3)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
def test_damaged_exif_data_leaves_the_picture_as_it_is_stored() -> None:
    data = oriented(quarter(RED), 6)
    for start in (data.index(b"Exif"), data.index(b"Exif") + 6, data.index(b"Exif") + 14):
        damaged = data[:start] + b"\xff" * 4 + data[start + 4 :]
        assert read_size(damaged, "image") in ((32, 48), (48, 32))
        assert decode(damaged, "image").shape[:2][::-1] == read_size(damaged, "image")


HEADER = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
MANY_PARTS = {
    "png": png([(b"IHDR", HEADER), *[(b"tEXt", b"")] * 9999]),
    "png, compressed": png([(b"IHDR", HEADER), *[(b"iCCP", b"a\0\0" + zlib.compress(b"a" * 9999))] * 999]),
    "png, private": png([(b"IHDR", HEADER), *[(b"aaAa", b"")] * 9999]),
    "jpeg": b"\xff\xd8" + b"\xff\xe1\0\2" * 9999,
    "jpeg, padded": b"\xff\xd8" + b"\xff" * 9999,
    "gif": b"GIF89a" + b"\1\0\1\0\0\0\0" + b"\x21\xfe\1a\0" * 9999,
    "gif, long": b"GIF89a" + b"\1\0\1\0\0\0\0" + b"\x21\xfe" + b"\1a" * 9999,
}


@pytest.mark.parametrize("name", MANY_PARTS)
def test_a_header_of_many_parts_is_not_read_to_its_end(name: str) -> None:
    with pytest.raises(InvalidRequest, match="too many parts"):
        read_size(MANY_PARTS[name], "image")


def test_damaged_entries_of_exif_data_are_not_logged() -> None:
    entries = b"".join(struct.pack("<HHLL", tag, 1, 99, 9999) for tag in range(1, 99))
    exif = b"II*\0" + struct.pack("<LH", 8, 98) + entries + bytes(4) + b"x" * 20_000
    image = png([(b"IHDR", HEADER), (b"eXIf", exif[:9999]), (b"IDAT", zlib.compress(b"\0\0")), (b"IEND", b"")])
    code = "import sys; from octavo_engine.media.picture import read_size; read_size(sys.stdin.buffer.read(), 'it')"
    run = subprocess.run((sys.executable, "-c", code), input=image, capture_output=True, check=True)
    assert run.stderr == b""
