"""Images of content parts and prompts: data URLs in each spelling become the bytes of the file."""

import json
from base64 import b64encode, encodebytes, urlsafe_b64encode
from typing import Any
from urllib.parse import quote

import pytest
from octavo_engine.media.payload import GivenImage, part_image, prompt_images
from octavo_engine.wire.errors import InvalidRequest

WHERE = "messages[0].content[1]"
DATA = bytes(range(256)) + b"\xfb\xff\xbf"
TEXT = b64encode(DATA).decode()
assert set("+/") <= set(TEXT)
SPELLINGS = {
    "plain": f"data:image/png;base64,{TEXT}",
    "no type": f"data:;base64,{TEXT}",
    "no type and no semicolon": f"data:base64,{TEXT}",
    "parameters": f"data:image/jpeg;name=a%20b.jpg;charset=utf-8;base64,{TEXT}",
    "url-safe": f"data:image/png;base64,{urlsafe_b64encode(DATA).decode()}",
    "unpadded": f"data:image/png;base64,{TEXT.rstrip('=')}",
    "in lines": f"data:image/png;base64,{encodebytes(DATA).decode()}",
    "in lines of windows": f"data:image/png;base64,{encodebytes(DATA).decode()}".replace("\n", "\r\n"),
    "percent signs": f"data:image/png;base64,{quote(TEXT, safe='')}",
    "capitals": f"DATA:image/png;BASE64,{TEXT}",
    "another type": f"data:text/plain;base64,{TEXT}",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_of_a_data_url_is_read(name: str) -> None:
    for image in (SPELLINGS[name], {"url": SPELLINGS[name]}, {"url": SPELLINGS[name], "detail": "auto"}):
        assert part_image({"type": "image_url", "image_url": image}, WHERE) == GivenImage(DATA)


@pytest.mark.parametrize("detail", [None, "auto", "low", "high"])
def test_a_detail_stands_beside_the_address(detail: str | None) -> None:
    given = {"url": SPELLINGS["plain"], "detail": detail}
    wanted = GivenImage(DATA, is_low=detail == "low")
    assert part_image({"type": "image_url", "image_url": given}, WHERE) == wanted
    assert part_image({"type": "image_url", "image_url": SPELLINGS["plain"], "detail": detail}, WHERE) == wanted


def test_an_object_of_a_script_stays() -> None:
    image = object()
    assert part_image({"type": "image_pil", "image_pil": image}, WHERE).image is image


REFUSED: dict[str, Any] = {
    "https": {"url": "https://example.com/cat.png"},
    "http": "http://example.com/cat.png",
    "a file": "file:///etc/passwd",
    "a path": "/etc/passwd",
    "no base64": "data:image/svg+xml,%3Csvg/%3E",
    "no comma": f"data:image/png;base64;{TEXT}",
    "other characters": f"data:image/png;base64,{TEXT[:40]}!{TEXT[40:]}",
    "one character too many": "data:image/png;base64,AAAAA",
    "letters that are not ascii": "data:image/png;base64,äää",
    "a padding in the middle": "data:image/png;base64,AA==AAAA",
    "nothing": None,
    "a number": 5,
    "an object without url": {"detail": "auto"},
    "a list": ["data:image/png;base64,AAAA"],
    "detail": {"url": SPELLINGS["plain"], "detail": "medium"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused_without_a_quotation(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        part_image({"type": "image_url", "image_url": REFUSED[name]}, WHERE)
    assert caught.value.param == WHERE
    assert str(caught.value).startswith(WHERE)
    assert not any(word in str(caught.value) for word in ("example.com", "passwd", TEXT[:40], "AAAA"))


@pytest.mark.parametrize(
    ("data", "places"),
    [
        (None, []),
        ({}, []),
        ({"image": None}, []),
        ({"image": []}, []),
        ({"image": "a"}, ["multi_modal_data.image[0]"]),
        ({"image": ("a", "b")}, ["multi_modal_data.image[0]", "multi_modal_data.image[1]"]),
    ],
    ids=json.dumps,
)
def test_a_prompt_has_one_image_or_a_list(data: Any, places: list[str]) -> None:
    assert list(prompt_images({"prompt": "Hi", "multi_modal_data": data})) == places


OTHERS = ("video", "audio", "image_embeds")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({"multi_modal_data": {"image": 1, name: 2}}, f"multi_modal_data.{name}") for name in OTHERS),
        ({"multi_modal_data": ["a"]}, "multi_modal_data"),
    ],
)
def test_data_of_other_kinds_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=param.rpartition(".")[2]) as caught:
        prompt_images({"prompt": "Hi", **fields})
    assert caught.value.param == param
