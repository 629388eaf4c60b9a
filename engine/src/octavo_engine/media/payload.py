"""Finds the images of a prompt or a content part: decodes data URLs to bytes; a script's objects stay as they are.

Messages never quote a URL or its data: they may be long, and private.
"""

import binascii
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from octavo_engine.wire.errors import InvalidRequest

_TO_STANDARD, _SPACE = bytes.maketrans(b"-_", b"+/"), b" \t\r\n"
_DETAILS = (None, "auto", "low", "high")
_EXAMPLE = "data:image/png;base64,..."


@dataclass(frozen=True, slots=True)
class GivenImage:
    """The bytes of an image file, or an image object from a script. `is_low`: whether the requested detail is "low"."""

    image: object
    is_low: bool = False


def part_image(part: Mapping[str, Any], where: str) -> GivenImage:
    """Return the image of an `image_url` or `image_pil` part. Raises InvalidRequest."""
    kind = part["type"]
    given = part.get(kind)
    if kind == "image_pil":
        return GivenImage(given)
    url, detail = (given.get("url"), given.get("detail")) if isinstance(given, Mapping) else (given, part.get("detail"))
    if not isinstance(url, str):
        raise InvalidRequest(f"{where}.{kind} must be a text, or an object with a url: {_EXAMPLE}", param=where)
    if detail not in _DETAILS:
        raise InvalidRequest(f"{where}: detail={detail!r:.40} is unknown: send auto, low or high.", param=where)
    return GivenImage(read_data_url(url, where), is_low=detail == "low")


def prompt_images(prompt: Mapping[str, Any]) -> dict[str, GivenImage]:
    """Return the images of a prompt's `multi_modal_data`, by their place. Raises InvalidRequest."""
    given = prompt.get("multi_modal_data") or {}
    if not isinstance(given, Mapping):
        raise InvalidRequest('multi_modal_data must be a dict: {"image": ...}.', param="multi_modal_data")
    if others := [name for name in given if name != "image"]:
        message = f"multi_modal_data holds {others[0]!r}, but only 'image' is supported: leave it out."
        raise InvalidRequest(message, param=f"multi_modal_data.{others[0]}")
    images = given.get("image")
    listed = images if isinstance(images, list | tuple) else [] if images is None else [images]
    return {f"multi_modal_data.image[{i}]": GivenImage(image) for i, image in enumerate(listed)}


def read_data_url(url: str, where: str) -> bytes:
    """Decode a data URL. Its media type is optional; its base64 may be URL-safe, without padding, or in several lines.

    Raises InvalidRequest.
    """
    scheme, _, rest = url.partition(":")
    if scheme.strip().lower() in ("http", "https"):
        message = f"{where} has an {scheme.strip().lower()} address, which is not supported yet: send a data URL."
        raise InvalidRequest(message, param=where)
    head, comma, text = rest.partition(",")
    if scheme.strip().lower() != "data" or not comma or head.rpartition(";")[2].strip().lower() != "base64":
        raise InvalidRequest(f"{where} must have a data URL in base64: {_EXAMPLE}", param=where)
    try:
        packed = (unquote(text) if "%" in text else text).encode("ascii").translate(_TO_STANDARD, _SPACE).rstrip(b"=")
        return b64decode(packed + b"=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        message = f"{where} has a data URL that is not valid base64: encode the bytes of the file."
        raise InvalidRequest(message, param=where) from error
