"""Rights of a router with the secret, and the effect of its headers without it."""

import asyncio

import pytest
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import tenant_salt
from octavo_server.http.router_secret import read_secrets, router_secrets
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving

SECRET = {"x-octavo-secret": "between-us"}
ALICE = {"x-octavo-tenant": "alice"}


@pytest.fixture
def engine(tmp_path):
    return ScriptedClient(write_byte_model(tmp_path))


@pytest.fixture
async def served(engine):
    keys = {"api_key": ("one", "two"), "cache_isolation": True}
    async with serving(engine, router_secret=("between-us", "between-us-new"), **keys) as started:
        yield started


async def complete(served, headers):
    return await served.http.post("/v1/completions", headers=headers, json={"prompt": "a"})


async def test_a_request_with_the_secret_has_the_routers_tenant(served):
    for tenant in ("alice", "bob"):
        assert (await complete(served, {**SECRET, "x-octavo-tenant": tenant})).status_code == 200
    assert (await complete(served, SECRET)).status_code == 200
    assert [r.cache_salt for r in served.engine.requests] == [tenant_salt("alice"), tenant_salt("bob"), ""]


async def test_each_secret_opens_the_kv_stream_and_admin_routes(served):
    for secret in ("between-us", "between-us-new"):
        for path in ("/kv/snapshot", "/debug/requests", "/drain", "/server_info"):
            assert (await served.http.get(path, headers={"x-octavo-secret": secret})).status_code == 200
    assert (await served.http.get("/kv/snapshot", headers={"authorization": "Bearer one"})).status_code == 403


async def test_a_wrong_secret_is_refused_and_never_shown(served, caplog):
    with caplog.at_level(0):
        answer = await complete(served, {"x-octavo-secret": "between-you", "authorization": "Bearer one", **ALICE})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")
    assert "--router-secret" in answer.json()["error"]["message"]
    assert "between" not in caplog.text + answer.text
    assert served.engine.requests == []


async def test_a_tenant_header_without_the_secret_is_ignored(served):
    assert (await complete(served, ALICE)).status_code == 401
    assert (await complete(served, {"authorization": "Bearer one", **ALICE})).status_code == 200
    assert served.engine.requests[0].cache_salt not in ("", tenant_salt("alice"))


async def test_a_server_without_a_secret_ignores_the_headers(engine):
    async with serving(engine, cache_isolation=True) as served:
        assert (await complete(served, {**SECRET, **ALICE})).status_code == 200
    assert engine.requests[0].cache_salt == ""


async def test_a_secret_without_keys_leaves_client_routes_open(engine):
    async with serving(engine, router_secret=("between-us",), cache_isolation=True) as served:
        assert (await complete(served, {**SECRET, **ALICE})).status_code == 200
        assert (await complete(served, {})).status_code == 200
    assert [r.cache_salt for r in engine.requests] == [tenant_salt("alice"), ""]


async def test_a_secret_without_keys_closes_admin_and_router_routes(engine):
    async with serving(engine, router_secret=("between-us",)) as served:
        for path in ("/kv/snapshot", "/debug/requests", "/drain", "/server_info"):
            assert (await served.http.get(path)).status_code == 401
            assert (await served.http.get(path, headers=SECRET)).status_code == 200


async def test_router_only_refuses_requests_without_the_secret(engine):
    guards = {"router_secret": ("between-us",), "api_key": ("key",), "router_only": True}
    async with serving(engine, **guards) as served:
        key = {"authorization": "Bearer key"}
        for path in ("/health", "/ready", "/ping", "/version", "/metrics"):
            assert (await served.http.get(path)).status_code == 200
        for path in ("/v1/models", "/kv/snapshot", "/drain", "/load", "/docs", "/openapi.json", "/nowhere"):
            refused = await served.http.get(path, headers=key)
            assert (refused.status_code, "--router-only" in refused.json()["error"]["message"]) == (401, True)
        assert (await complete(served, {})).status_code == 401
        assert (await complete(served, {**SECRET, **ALICE})).status_code == 200


async def test_cached_tokens_are_shown_to_routers_and_not_to_clients(engine):
    engine.num_cached_tokens = 16
    async with serving(engine, api_key=("key",), router_secret=("between-us",)) as served:
        key = {"authorization": "Bearer key"}
        assert "x-octavo-cached-tokens" not in (await complete(served, key)).headers
        assert (await complete(served, SECRET)).headers["x-octavo-cached-tokens"] == "16"


def test_secrets_are_read_from_a_file_and_a_folder(tmp_path):
    file = tmp_path / "secret"
    file.write_text("new\n\n old \n")
    assert [*read_secrets(file).values()] == ["new", "old"]
    (tmp_path / ".hidden").write_text("no")
    assert [*read_secrets(tmp_path).values()] == ["new", "old"]
    ring = router_secrets(("given", "old"), file)
    assert all(ring.tenant_of(s) for s in (b"given", b"old", b"new"))
    assert ring.tenant_of(b"") is None
    assert router_secrets((), None) is None


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_a_secret_is_an_error_that_shows_none(tmp_path, content):
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(StartupError, match=str(tmp_path)):
        router_secrets((), tmp_path / "secret")
    with pytest.raises(StartupError, match="No such file"):
        router_secrets((), tmp_path / "none")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
        ("/v1/responses", {"input": "abc"}),
    ],
)
async def test_each_response_head_has_the_cached_tokens(engine, path, body, is_stream):
    engine.num_cached_tokens = 32
    async with serving(engine) as served:
        answer = await served.http.post(path, json={**body, "stream": is_stream})
        assert answer.headers["x-octavo-cached-tokens"] == "32"


async def test_a_stream_head_has_the_cached_tokens(engine):
    engine.num_cached_tokens, engine.hold_at = 16, 1
    body = {"prompt": "abc", "stream": True}
    async with (
        serving(engine) as served,
        asyncio.timeout(120),
        served.http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.headers["x-octavo-cached-tokens"] == "16"
        assert engine.running
        engine.resumed.set()
        await answer.aread()


async def test_several_prompts_sum_up_their_cached_tokens_or_omit_them(engine):
    engine.num_cached_tokens = 16
    async with serving(engine) as served:
        body = {"prompt": ["abc", "def"]}
        answer = await served.http.post("/v1/completions", json=body)
        assert answer.headers["x-octavo-cached-tokens"] == "32"
        streamed = await served.http.post("/v1/completions", json={**body, "stream": True})
        assert "x-octavo-cached-tokens" not in streamed.headers


async def test_a_refusal_has_no_cache_headers(engine):
    engine.fail_at = 0
    async with serving(engine) as served:
        answer = await served.http.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert "x-octavo-cached-tokens" not in answer.headers
