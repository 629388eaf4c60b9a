"""Images that a model cannot take are refused over HTTP: by its server, and by a router before it."""

from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import EngineConfig
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.pictures import RED, encoded, quarter
from octavo_testing.routing import WAYS, reaching
from octavo_testing.scripted import VOCAB_SIZE, write_byte_model
from octavo_testing.server import MODEL, Served, serving
from octavo_testing.tiny_vision import make_tiny_vision

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def gguf(folder: Path) -> EngineConfig:
    write_tiny_gguf(folder / "m.gguf", "llama", tiny_model("llama", vocab_size=VOCAB_SIZE))
    return EngineConfig(model=str(folder / "m.gguf"), tokenizer=str(write_byte_model(folder)), max_model_len=256)


def qwen(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(make_tiny_vision("qwen2_vl", folder)), dtype="float32", max_model_len=256)


def ask(*sizes: tuple[int, int]) -> list[dict[str, object]]:
    """Return a question about images of these sizes."""
    urls = ["data:;base64," + b64encode(encoded(quarter(RED, size=size), "PNG")).decode() for size in sizes]
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": "Which?"}, *images]}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    config = request.param(tmp_path_factory.mktemp("model"))
    with scripted_environment():
        async with running(config, DEFAULT_LOADER) as engine, serving(engine) as served:
            yield served


#: By model: sizes of an image that it refuses, words of the refusals, and sizes of images that it takes.
CASES = [
    (gguf, {(48, 32): "'image_url'; this model accepts only text: leave it out"}, []),
    (qwen, {(w, h): f"has {w} x {h} pixels.*limit is 200 times: cut" for w, h in [(201, 1), (2, 402)]}, [(200, 1)]),
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("server", "refused", "taken"), CASES, indirect=["server"], scope="module")
async def test_a_refusal_says_where_and_why_and_the_next_request_works(
    server: Served, way: str, refused: dict[tuple[int, int], str], taken: list[tuple[int, int]], stream: bool
) -> None:
    async with reaching(server, way) as door:
        create = door.openai.chat.completions.create
        for size, words in refused.items():
            with pytest.raises(openai.BadRequestError, match=words) as caught:
                await create(model=MODEL, messages=ask(size), stream=stream)
            assert caught.value.param == "messages[0].content[1]"
            good = await create(model=MODEL, messages=ask(*taken), max_tokens=2)
            assert good.usage.completion_tokens
