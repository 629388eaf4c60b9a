"""Images in `/v1/chat/completions`: a tiny SmolVLM in a real engine core, through the `openai` package.

Requests go to the server, and to a router before it.
"""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from octavo_engine import LLM, SamplingParams
from octavo_engine.settings.config import EngineConfig
from octavo_server.config import RequestLimits
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.failing_tower import LOADER, TOWER_FAULT
from octavo_testing.fleets import until
from octavo_testing.pictures import BLUE, RED, empty_png, encoded, quarter
from octavo_testing.routing import WAYS, Routed, reaching
from octavo_testing.server import MODEL, Served, serving
from octavo_testing.tiny_vision import IMAGE, make_tiny_vision

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PNG = encoded(quarter(RED), "PNG")
OTHER = encoded(quarter(BLUE, size=(90, 30)), "WEBP", lossless=True)
LIMIT = 200_000
EXACT: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision("smolvlm", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that makes the tower fail for pictures of a single colour."""
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path, fault: Path) -> AsyncIterator[Served]:
    with scripted_environment(), pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOWER_FAULT, str(fault))
        config = EngineConfig(model=str(folder), dtype="float32", max_model_len=256, limit_mm_per_prompt={"image": 9})
        async with (
            running(config, LOADER) as engine,
            serving(engine, limits=RequestLimits(max_request_bytes=LIMIT), max_body_memory=4 * LIMIT) as served,
        ):
            yield served


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(way: str, server: Served) -> AsyncIterator[Served | Routed]:
    async with reaching(server, way) as reached:
        yield reached


def image(data: bytes, kind: str = "image/png", **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{b64encode(data).decode()}", **fields}}


def ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [p if isinstance(p, dict) else {"type": "text", "text": p} for p in parts]}]


CONVERSATIONS = {
    "one image": ask(image(PNG), "Which colour?"),
    "two images": ask("First", image(PNG), "second", image(OTHER), "?"),
    "url as text": ask({"type": "image_url", "image_url": image(PNG)["image_url"]["url"]}, "Which?"),
    "two turns": [
        *ask(image(PNG), "Which?"),
        {"role": "assistant", "content": "red"},
        *ask(image(OTHER), "And this?"),
    ],
    "low detail": ask(image(PNG, detail="low"), "Which colour?"),
}
SMALL: dict[str, Any] = {"mm_processor_kwargs": {"size": {"longest_edge": 32}}}
#: Conversations about pictures of a single colour, by the way, the fault of the tower, and whether they are streamed.
PLAIN = {
    case: ask("Which?", image(encoded(quarter(colour, colour, size=(64, 64)), "PNG")), "?")
    for i, case in enumerate(product(WAYS, ("raises", "poisons"), (False, True)))
    for colour in [(30 * i, 255 - 30 * i, 0)]
}


@pytest.fixture(scope="module")
def offline(folder: Path) -> dict[Any, Any]:
    """The answers of `LLM.chat`."""
    llm, asked = LLM(str(folder), dtype="float32", max_model_len=256), CONVERSATIONS | PLAIN
    outputs = llm.chat(list(asked.values()), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    llm.shutdown()
    return dict(zip(asked, outputs, strict=True))


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_answers_equal_those_of_llm(door: Served | Routed, offline: dict[Any, Any], name: str) -> None:
    messages, wanted = CONVERSATIONS[name], offline[name]
    whole = await door.openai.chat.completions.create(model=MODEL, messages=messages, **EXACT)
    assert whole.choices[0].message.content == wanted.outputs[0].text
    tokenized = (await door.http.post("/tokenize", json={"messages": messages})).json()
    rendered = (await door.http.post("/v1/chat/completions/render", json={"messages": messages})).json()
    assert tokenized["tokens"] == rendered["token_ids"] == wanted.prompt_token_ids
    assert whole.usage.prompt_tokens == tokenized["count"] == len(wanted.prompt_token_ids)
    stream = await door.openai.chat.completions.create(model=MODEL, messages=messages, stream=True, **EXACT)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == wanted.outputs[0].text


async def test_settings_of_the_image_processor_count_for_their_request(server: Served, folder: Path) -> None:
    messages = CONVERSATIONS["two images"]
    llm = LLM(str(folder), dtype="float32", max_model_len=256)
    (wanted,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False, **SMALL)
    llm.shutdown()
    answer = await server.openai.chat.completions.create(model=MODEL, messages=messages, extra_body=SMALL, **EXACT)
    assert answer.choices[0].message.content == wanted.outputs[0].text
    for path in ("/tokenize", "/v1/chat/completions/render"):
        counted = (await server.http.post(path, json={"messages": messages, **SMALL})).json()
        assert (counted.get("tokens") or counted["token_ids"]) == wanted.prompt_token_ids
    usual = (await server.http.post("/tokenize", json={"messages": messages})).json()
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids) < usual["count"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"])
@pytest.mark.parametrize("kwargs", [{"size": {"longest_edge": 65}}, {"do_rescale": False}, [1]])
async def test_settings_for_more_pixels_or_of_other_names_are_refused(
    door: Served | Routed, path: str, kwargs: Any
) -> None:
    body = {"messages": CONVERSATIONS["one image"], "mm_processor_kwargs": kwargs}
    refused = await door.http.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mm_processor_kwargs")


async def test_several_answers_tools_beams_and_json(door: Served | Routed) -> None:
    messages, create = CONVERSATIONS["one image"], door.openai.chat.completions.create
    three = await create(model=MODEL, messages=messages, n=3, seed=1, max_tokens=8)
    assert len(three.choices) == 3
    schema = {"name": "colour", "schema": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}
    made = await create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert json.loads(made.choices[0].message.content)["a"] == 1
    beams = await create(
        model=MODEL, messages=messages, n=2, temperature=0, max_tokens=4, extra_body={"use_beam_search": True}
    )
    assert len(beams.choices) == 2


def faults() -> dict[str, tuple[list[dict[str, Any]], str]]:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    return {
        "cut": (ask(image(PNG[:-30]), "?"), "Image 1 of the prompt"),
        "text": (ask(image(b"no image at all"), "?"), "messages[0].content[0]"),
        "svg": (ask("?", image(svg, "image/svg+xml")), "messages[0].content[1]"),
        "eps": (ask(image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "?"), "messages[0].content[0]"),
        "heic": (ask(image(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "image/heic"), "?"), "PNG, JPEG, WebP and GIF"),
        "bomb": (ask(image(empty_png(13_000, 13_000)), "?"), "64"),
        "other size": (ask(image(empty_png(64, 64, rows=8)), "?"), "Image 1 of the prompt"),
        "an address": (ask({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}), "data URL"),
        "no base64": (ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}), "base64"),
        "more than the context": (ask(*[image(encoded(quarter(RED, size=(64, 64)), "PNG"))] * 9, "?"), "context"),
        "more than the limit": (ask(*[image(PNG)] * 10, "?"), "the limit is 9"),
        "audio": (ask({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}), "input_audio"),
        "embeddings": (ask({"type": "image_embeds", "image_embeds": "AAAA"}), "image_embeds"),
        "a detail": (ask(image(PNG, detail="medium")), "detail='medium'"),
        "no url": (ask({"type": "image_url", "image_url": {}}, "?"), "messages[0].content[0]"),
        "its token": (ask("<image>", "?"), "messages[0]"),
        "a video": (ask({"type": "video_url", "video_url": {"url": "data:,"}}), "video_url"),
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", faults())
async def test_refusals_name_the_place(door: Served | Routed, name: str, stream: bool) -> None:
    messages, words = faults()[name]
    with pytest.raises(openai.BadRequestError) as caught:
        await door.openai.chat.completions.create(model=MODEL, messages=messages, stream=stream)
    assert words in str(caught.value)
    good = await door.openai.chat.completions.create(model=MODEL, messages=CONVERSATIONS["one image"], max_tokens=2)
    assert good.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["raises", "poisons"])
async def test_a_tower_that_fails_for_one_image_ends_its_request_only(
    door: Served | Routed, way: str, fault: Path, offline: dict[Any, Any], kind: str, stream: bool
) -> None:
    """Asked again, the image is computed again: neither its error nor its blocks are kept."""
    messages = PLAIN[way, kind, stream]
    good = [CONVERSATIONS[name] for name in list(CONVERSATIONS)[:3]]

    async def answer(messages: list[dict[str, Any]], *, stream: bool = False) -> str:
        create = door.openai.chat.completions.create
        if not stream:
            return (await create(model=MODEL, messages=messages, **EXACT)).choices[0].message.content
        chunks = await create(model=MODEL, messages=messages, stream=True, **EXACT)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    fault.write_text(kind)
    try:
        tasks = [answer(messages, stream=stream), *(answer(each) for each in good)]
        failed, *others = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        fault.unlink()
    assert isinstance(failed, openai.APIStatusError)
    assert failed.status_code == 500
    assert others == [offline[name].outputs[0].text for name in list(CONVERSATIONS)[:3]]
    again = await door.openai.chat.completions.create(model=MODEL, messages=messages, **EXACT)
    assert again.choices[0].message.content == offline[way, kind, stream].outputs[0].text
    assert again.usage.prompt_tokens_details.cached_tokens <= 16, "only the block before the image may be cached"


BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(PNG).decode()}}
OTHER_DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": [BLOCK]}]}),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": [BLOCK]}]}),
    "responses": (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": image(PNG)["image_url"]["url"]}]}
            ]
        },
    ),
    "completions": ("/v1/completions", {"prompt": "Hi", "multi_modal_data": {"image": b64encode(PNG).decode()}}),
    "completions with its token": ("/v1/completions", {"prompt": "<image> Hi"}),
    "completions with the id of its token": ("/v1/completions", {"prompt": [65, IMAGE]}),
    "completions with settings": ("/v1/completions", {"prompt": "Hi", **SMALL}),
}


@pytest.mark.parametrize("name", OTHER_DOORS)
async def test_doors_that_take_no_images_refuse_them(door: Served | Routed, name: str) -> None:
    path, body = OTHER_DOORS[name]
    refused = await door.http.post(path, json={"model": MODEL, **body})
    assert refused.status_code == 400
    assert any(word in refused.text for word in ("'image'", "input_image", "'<image>'", "multi_modal_data", "mm_proc"))
    assert b64encode(PNG).decode()[:60] not in refused.text


async def test_images_hold_the_memory_of_bodies_until_their_answer_ends(server: Served) -> None:
    budget = server.server.config.app.state.context.body_budget
    answer = {"messages": CONVERSATIONS["two images"], "stream": True, "max_tokens": 32, "ignore_eos": True}
    async with server.http.stream("POST", "/v1/chat/completions", json=answer) as response:
        lines = response.aiter_lines()
        assert "chat.completion.chunk" in await anext(lines)
        assert budget.num_bytes == len(PNG) + len(OTHER)
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]
    assert budget.num_bytes == 0


async def test_a_client_that_leaves_frees_its_images(server: Served) -> None:
    budget = server.server.config.app.state.context.body_budget
    answer = {"messages": CONVERSATIONS["two images"], "stream": True, "max_tokens": 100, "ignore_eos": True}
    async with server.http.stream("POST", "/v1/chat/completions", json=answer) as response:
        assert "chat.completion.chunk" in await anext(response.aiter_lines())
        assert budget.num_bytes
    await until(lambda: budget.num_bytes == 0)


async def test_images_beyond_the_memory_of_bodies_wait_outside(server: Served) -> None:
    noise = b64encode(encoded(quarter(RED, size=(400, 300)), "PNG", compress_level=0)).decode()
    body = {"messages": ask(image(PNG), "?"), "max_tokens": 1, "padding": noise[: LIMIT - 2000]}
    assert (await server.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert (await server.http.post("/v1/chat/completions", json={**body, "more": "x" * 4000})).status_code == 413
