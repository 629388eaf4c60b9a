"""A model that is trained to name a colour answers about images through `octavo serve` and through `octavo route`."""

import json
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo_testing.colour_llava import COLOURS, PROMPT, QUESTION, make_colour_llava
from octavo_testing.pictures import encoded, quarter
from octavo_testing.route_command import octavo_route
from octavo_testing.serve_command import octavo_serve
from octavo_testing.server import MODEL
from openai import OpenAI
from transformers import AutoImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", "float32", "--max-model-len", "256", "--served-model-name", MODEL, "--disable-any-whitespace")
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
SCHEMA = {"type": "object", "properties": {"colour": {"enum": [*COLOURS]}}, "required": ["colour"]}
SCHEMA |= {"additionalProperties": False}
WORD: dict[str, Any] = {"temperature": 0, "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "paint"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA}}
#: By name: fields of a request, and the texts of its choices by the colour of the picture.
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], list[str]]]] = {
    "a word": (WORD, lambda colour: [colour]),
    "three": ({**WORD, "n": 3, "temperature": 0.1, "seed": 1}, lambda colour: [colour] * 3),
    "tools": ({**WORD, "tools": [TOOL]}, lambda colour: [colour]),
    "a call": (
        {"temperature": 0, "tools": [TOOL], "tool_choice": NAMED},
        lambda colour: [f"paint {json.dumps({'colour': colour}, separators=(',', ':'))}"],
    ),
    "a schema": (
        {"temperature": 0, "response_format": FORMAT},
        lambda colour: [json.dumps({"colour": colour}, separators=(",", ":"))],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colour_llava(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with octavo_serve(tmp_path_factory.mktemp("serve"), str(folder), *FLAGS, *TOOLS) as serving:
        yield serving.url


@pytest.fixture(scope="module", params=["serve", "route"])
def client(request: pytest.FixtureRequest, server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    if request.param == "serve":
        with OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as made:
            yield made
        return
    with octavo_route(tmp_path_factory.mktemp("route"), "--replica", server) as route:
        route.wait_until_exact(1)
        with OpenAI(base_url=f"{route.url}/v1", api_key="none", max_retries=0) as made:
            yield made


def conversation(colour: str) -> list[Any]:
    data = b64encode(encoded(quarter(COLOURS[colour]), "PNG")).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    return [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]


def shown(message: Any) -> str:
    """Return the text of a message, or of a part of it in a stream: its content, or the name and arguments of calls."""
    calls = [call.function for call in message.tool_calls or ()]
    return (message.content or "") + "".join(f"{call.name} " * bool(call.name) + call.arguments for call in calls)


def ask(client: OpenAI, colour: str, *, stream: bool, **fields: Any) -> tuple[list[str], int]:
    """Return the texts of the choices and the number of the prompt's tokens."""
    body: dict[str, Any] = {"model": MODEL, "messages": conversation(colour), "max_tokens": 64, **fields}
    if not stream:
        whole = client.chat.completions.create(**body)
        return [shown(choice.message) for choice in whole.choices], whole.usage.prompt_tokens
    texts = defaultdict[int, str](str)
    for chunk in client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += shown(choice.delta)
    return [texts[index] for index in sorted(texts)], chunk.usage.prompt_tokens


@pytest.fixture(scope="module")
def prompt_ids(folder: Path) -> list[int]:
    """The token ids of the prompt by transformers' processor."""
    images = AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="<pad>")
    patch = json.loads((folder / "config.json").read_text())["vision_config"]["patch_size"]
    options = {"patch_size": patch, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(images, tokenizer, **options)
    return list(processor(images=[quarter(COLOURS["red"])], text=PROMPT, add_special_tokens=False)["input_ids"][0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_the_colour_of_a_picture_is_named(client: OpenAI, prompt_ids: list[int], form: str, stream: bool) -> None:
    fields, wanted = FORMS[form]
    answers = {colour: ask(client, colour, stream=stream, **fields) for colour in COLOURS}
    assert answers == {colour: (wanted(colour), len(prompt_ids)) for colour in COLOURS}


@pytest.mark.parametrize("colour", COLOURS)
def test_tokens_equal_those_of_transformers(client: OpenAI, prompt_ids: list[int], colour: str) -> None:
    body = {"model": MODEL, "messages": conversation(colour)}
    tokenized = client.post("../tokenize", body=body, cast_to=dict[str, Any])
    rendered = client.post("/chat/completions/render", body=body, cast_to=dict[str, Any])
    assert (tokenized["tokens"], tokenized["count"]) == (prompt_ids, len(prompt_ids))
    assert rendered["token_ids"] == prompt_ids
