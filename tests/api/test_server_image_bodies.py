"""Large bodies with images at a server with its default limits and at a router: a tiny LLaVA in a real engine core."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.settings.config import EngineConfig
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.pictures import encoded
from octavo_testing.routing import WAYS, reaching
from octavo_testing.server import MODEL, Served, serving
from octavo_testing.tiny_vision import make_tiny_vision
from PIL import Image

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHAT, JSON = "/v1/chat/completions", {"content-type": "application/json"}
MIB = 2**20
AT_ONCE = 40
TEXT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = make_tiny_vision("llava", tmp_path_factory.mktemp("vision"))
    with scripted_environment():
        config = EngineConfig(model=str(folder), dtype="float32", max_model_len=256)
        async with running(config, DEFAULT_LOADER) as engine, serving(engine) as served:
            yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS)
async def http(request: pytest.FixtureRequest, server: Served) -> AsyncIterator[Any]:
    async with reaching(server, request.param) as door:
        yield door.http


def body(num_bytes: int) -> bytes:
    """Return a chat about an image without compression that has nearly this size, filled with spaces."""
    height = num_bytes * 3 // 4 // (3 * 2000) - 8
    data = encoded(Image.fromarray(np.full((height, 2000, 3), 90, np.uint8)), "PNG", compress_level=0)
    url = "data:image/png;base64," + b64encode(data).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    made = json.dumps({**TEXT, "messages": [{"role": "user", "content": content}]}).encode()
    return made + b" " * (num_bytes - len(made))


async def test_a_body_of_31_mib_is_answered_and_one_of_33_is_refused(http: Any) -> None:
    answer = await http.post(CHAT, content=body(31 * MIB), headers=JSON)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)
    refused = await http.post(CHAT, content=body(33 * MIB), headers=JSON)
    assert refused.status_code == 413
    assert f"{32 * MIB}" in refused.json()["error"]["message"]
    assert (await http.post(CHAT, json=TEXT)).status_code == 200


async def test_40_large_bodies_at_once_harm_no_text(http: Any, server: Served) -> None:
    """The memory of bodies bounds those that are served at once; it is free again afterwards."""
    large = body(31 * MIB)
    tasks = [asyncio.create_task(http.post(CHAT, content=large, headers=JSON)) for _ in range(AT_ONCE)]
    texts = [(await http.post(CHAT, json=TEXT)).status_code for _ in range(20)]
    answers = [(await task) for task in tasks]
    assert texts == [200] * 20
    counts = {status: [each.status_code for each in answers].count(status) for status in (200, 429, 503)}
    assert sum(counts.values()) == AT_ONCE
    assert counts[200] >= 1
    assert counts[429] + counts[503] >= 1
    refused = [each for each in answers if each.status_code != 200]
    assert all("--max-body-memory" in each.json()["error"]["message"] for each in refused)
    assert all(each.headers["retry-after"] for each in refused)
    assert server.server.config.app.state.context.body_budget.num_bytes == 0
