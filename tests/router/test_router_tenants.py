"""Weights and limits of tenants, from the file of a router or a server to the engine."""

import pytest
from octavo_server import api_keys
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

KEYS = "alice: sk-a\nbob: sk-b\n"
TENANTS = "default: {weight: 2}\ntenants: {alice: {weight: 0.5, maxTokens: 3}}\n"
BODIES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
}
BEAMS = {"prompt": "hi", "max_tokens": 9, "use_beam_search": True, "n": 2, "temperature": 0}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(api_keys, "CHECK_EVERY_S", 0.0)
    (tmp_path / "keys").write_text(KEYS)
    (tmp_path / "tenants.yaml").write_text(TENANTS)
    return tmp_path


def bearer(key):
    return {"authorization": f"Bearer {key}", "x-octavo-weight": "100", "x-octavo-max-tokens": "1"}


def of_files(files):
    return {"api_key_file": (files / "keys",), "tenants_file": files / "tenants.yaml"}


async def check_engine(http, engine):
    """Assert what the engine gets with requests of both keys."""
    for path, body in BODIES.items():
        for key in ("sk-a", "sk-b"):
            assert (await http.post(path, json=body, headers=bearer(key))).status_code == 200
    requests = [(request.tenant, request.weight, request.params.max_tokens) for request in engine.requests]
    room = engine.max_model_len - len(engine.requests[3].prompt_token_ids)
    assert requests == [
        *[("alice", 0.5, 3), ("bob", 2.0, 9)],
        *[("alice", 0.5, 3), ("bob", 2.0, room)],
        *[("alice", 0.5, 2), ("bob", 2.0, 2)],
    ]


async def test_a_server_reads_its_own_file(files):
    engine = ScriptedClient(write_byte_model(files))
    async with serving(engine, **of_files(files)) as served:
        await check_engine(served.http, engine)
        engine.requests.clear()
        (files / "tenants.yaml").write_text("tenants: {bob: {weight: 4}}")
        for key in ("sk-a", "sk-b"):
            assert (await served.http.post("/v1/completions", json=BEAMS, headers=bearer(key))).status_code == 200
        weights = {(request.tenant, request.weight) for request in engine.requests}
        assert weights == {("alice", 1.0), ("bob", 4.0)}


@pytest.mark.parametrize("of_server", ["", "default: {weight: 7, maxTokens: 1}"], ids=["no file", "another file"])
async def test_a_router_sends_what_its_file_has(files, of_server):
    engine = ScriptedClient(write_byte_model(files))
    own = {"router_secret": ("s3cret",)}
    if of_server:
        (files / "of_server.yaml").write_text(of_server)
        own["tenants_file"] = files / "of_server.yaml"
    async with (
        serving(engine, **own) as served,
        routing(served.url, router_secret=("s3cret",), **of_files(files)) as routed,
    ):
        await routed.routable(MODEL, 1)
        if not of_server:
            await check_engine(routed.http, engine)
        else:
            for key in ("sk-a", "sk-b"):
                await routed.http.post("/v1/completions", json=BODIES["/v1/completions"], headers=bearer(key))
            assert [request.weight for request in engine.requests] == [0.5, 2.0]
            assert [request.params.max_tokens for request in engine.requests] == [3, 9]
