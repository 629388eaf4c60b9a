"""Limits of tenants over two routers and two replicas by HTTP."""

from collections import Counter
from contextlib import AsyncExitStack

import httpx
import pytest
from octavo_server.http import rate_limits
from octavo_server.kv import publisher
from octavo_testing.fleets import until
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving
from openai import AsyncOpenAI

pytestmark = pytest.mark.slow

SECRET = {"router_secret": ("s3cret",)}


@pytest.fixture
async def fleet(tmp_path, request, monkeypatch):
    if window_s := getattr(request, "param", None):
        monkeypatch.setattr(rate_limits, "WINDOW_S", window_s)
        monkeypatch.setattr(publisher, "TENANT_WINDOW_S", window_s)
    (tmp_path / "keys").write_text("alice: sk-a\nbob: sk-b\n")
    (tmp_path / "tenants.yaml").write_text("tenants: {alice: {requestsPerMinute: 4}}")
    files = {"api_key_file": (tmp_path / "keys",), "tenants_file": tmp_path / "tenants.yaml"}
    async with AsyncExitStack() as stack:
        engines = [ScriptedClient(write_byte_model(tmp_path)) for _ in range(2)]
        replicas = [await stack.enter_async_context(serving(engine, **SECRET)) for engine in engines]
        urls = [replica.url for replica in replicas]
        routers = [await stack.enter_async_context(routing(*urls, **SECRET, **files)) for _ in range(2)]
        for routed in routers:
            await routed.routable(MODEL, 2)
        yield routers, engines, files


@pytest.mark.parametrize("fleet", [4], indirect=True, ids=["windows of 4 s"])
async def test_the_openai_client_succeeds_by_its_own_retries(fleet):
    (routed, _), _, _ = fleet
    codes = []

    async def record(response):
        codes.append(response.status_code)

    http = httpx.AsyncClient(event_hooks={"response": [record]})
    async with AsyncOpenAI(base_url=f"{routed.url}/v1", api_key="sk-a", max_retries=2, http_client=http) as openai:
        for i in range(6):
            answer = await openai.completions.create(model=MODEL, prompt=f"{i}", max_tokens=1)
            assert answer.choices
    assert (codes[:5], codes.count(200), set(codes)) == ([200] * 4 + [429], 6, {200, 429})


async def test_two_routers_share_a_limit(fleet):
    routers, engines, files = fleet
    codes = Counter()

    async def send(routed, key, i):
        body = {"model": MODEL, "prompt": f"{i}", "max_tokens": 1}
        answer = await routed.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        codes[key, answer.status_code] += 1

    for i in range(10):
        await send(routers[i % 2], "sk-a", i)
        await send(routers[i % 2], "sk-b", i)
        num = codes["sk-a", 200]
        await until(lambda num=num: all(r.router.rate_limits.usage("alice").requests == num for r in routers))
    assert codes == {("sk-a", 200): 4, ("sk-a", 429): 6, ("sk-b", 200): 10}
    assert sum(request.tenant == "alice" for engine in engines for request in engine.requests) == 4
    started = routing(*(replica.url for replica in routers[0].router.fleet.replicas), **SECRET, **files)
    async with started as new:  # a router that starts knows what was used before
        await new.routable(MODEL, 2)
        await send(new, "sk-a", 10)
    assert codes["sk-a", 429] == 7
