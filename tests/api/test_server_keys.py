"""API keys over HTTP: the guarded paths, the tenant of a request, and separate caches of tenants."""

import pytest
from octavo_engine.wire.hashing import tenant_salt
from octavo_server.http.access import kind_of
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving


def bearer(key):
    return {"Authorization": f"Bearer {key}".encode()}


@pytest.fixture
async def served(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-a\nbob: sk-b\nadmin: sk-root\n")
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine, api_key=("sécond",), api_key_file=(keys,), cache_isolation=True) as started:
        yield started


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": "sk-a"}, {"Authorization": "Basic sk-a"}])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/tokenize", "/detokenize", "/debug/requests"])
async def test_without_a_key_there_is_a_401(served, headers, path):
    answer = await served.http.post(path, headers=headers, json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "AuthenticationError")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["sk-a", "sk-b", "sécond"])
async def test_each_key_is_accepted(served, key):
    assert (await served.http.get("/v1/models", headers=bearer(key))).status_code == 200


async def test_routes_of_probes_and_documents_need_no_key(served):
    for path in ("/health", "/metrics", "/version", "/load", "/ping", "/openapi.json", "/docs"):
        assert (await served.http.get(path)).status_code == 200


async def test_every_other_documented_path_is_guarded(served):
    paths = (await served.http.get("/openapi.json")).json()["paths"]
    guarded = [path for path in paths if (await served.http.get(path)).status_code == 401]
    assert set(paths) - set(guarded) == {p for p in paths if kind_of(p) in ("probe", "metrics", "public")}
    assert len(guarded) > 5


async def test_only_the_admin_key_opens_admin_routes(served):
    refused = await served.http.get("/debug/requests", headers=bearer("sk-a"))
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "PermissionDeniedError")
    assert (await served.http.get("/debug/requests", headers=bearer("sk-root"))).status_code != 403


async def test_a_single_key_is_not_the_admin_key(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), api_key=("only",)) as served:
        for method, path in (("GET", "/debug/requests"), ("POST", "/drain"), ("GET", "/kv/snapshot")):
            refused = await served.http.request(method, path, headers=bearer("only"))
            assert refused.status_code == 403
            assert "admin" in refused.json()["error"]["message"]
        assert served.server._lifecycle.state == "accepting"


@pytest.mark.parametrize("root_path", ["/", "/prefix", "/debug"])
async def test_a_root_path_changes_no_access_rule(tmp_path, root_path):
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-a\n")
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine, api_key_file=(keys,), root_path=root_path) as served:
        for path in ("/debug/requests", f"{root_path}/debug/requests"):
            answer = await served.http.get(path, headers=bearer("sk-a"))
            assert answer.status_code in (403, 404)
            assert (await served.http.get(path)).status_code == 401


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_cache_salt_includes_the_tenant(served, path):
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    sent = [("sk-a", {}), ("sk-a", {"cache_salt": "own"}), ("sk-b", {"cache_salt": tenant_salt("alice")})]
    for key, fields in sent:
        assert (await served.http.post(path, headers=bearer(key), json={**body, **fields})).status_code == 200
    salts = [request.cache_salt for request in served.engine.requests]
    assert salts == [tenant_salt("alice"), tenant_salt("alice", "own"), tenant_salt("bob", tenant_salt("alice"))]


async def test_tenants_share_the_cache_without_isolation(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path)), api_key=("k",)) as served:
        for fields in ({}, {"cache_salt": "own"}):
            body = {"prompt": "a", **fields}
            assert (await served.http.post("/v1/completions", headers=bearer("k"), json=body)).status_code == 200
        assert [r.cache_salt for r in served.engine.requests] == ["", tenant_salt("", "own")]


async def test_no_key_is_ever_logged(served, caplog):
    with caplog.at_level(0):
        await served.http.get("/v1/models", headers=bearer("sk-a"))
        await served.http.get("/v1/models", headers=bearer("sk-wrong"))
    assert "sk-" not in caplog.text
