import asyncio

import pytest
import pytest_asyncio
from octavo_engine.wire.inspection import SequenceInfo
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITING = SequenceInfo(
    request_id="cmpl-1-0",
    indices=[0],
    state="waiting",
    waiting_reason="capacity",
    prompt_tokens=5,
    generated_tokens=0,
    computed_tokens=0,
    cached_tokens=0,
    blocks=0,
    preemptions=0,
    priority=0,
    age_s=1.5,
    queued_s=1.5,
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory):
    engine = ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")))
    async with serving(engine) as started:
        yield started


async def test_debug_requests_shows_waiting_sequences_with_their_reason(served):
    served.engine.sequences = [WAITING]
    answer = (await served.http.get("/debug/requests")).json()
    assert (answer["running"], answer["waiting"]) == (0, 1)
    (shown,) = answer["sequences"]
    assert (shown["request_id"], shown["waiting_reason"], shown["age_s"]) == ("cmpl-1-0", "capacity", 1.5)
    assert set(shown) == set(SequenceInfo.__dataclass_fields__)


async def test_reset_response_says_whether_the_cache_was_reset(served):
    done = await served.http.post("/reset_prefix_cache")
    assert (done.status_code, done.json()) == (200, {"reset": True})
    served.engine.hold_at = 1
    body = {"model": MODEL, "prompt": "x"}
    running = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await served.engine.held.wait()
    refused = await served.http.post("/reset_prefix_cache")
    assert (refused.status_code, refused.json()["reset"]) == (200, False)
    assert "/debug/requests" in refused.json()["reason"]
    served.engine.resumed.set()
    await running


async def test_server_info_shows_settings_but_no_secret(served):
    info = (await served.http.get("/server_info")).json()
    assert info["engine_config"]["max_model_len"] == 512
    assert info["engine"]["block_size"] == 16
    assert "hash_root" not in info["engine"]


async def test_admin_routes_require_a_key(tmp_path):
    (tmp_path / "keys").write_text("admin: secret\n")
    async with serving(ScriptedClient(write_byte_model(tmp_path)), api_key_file=(tmp_path / "keys",)) as other:
        for method, path in (("GET", "/debug/requests"), ("POST", "/reset_prefix_cache"), ("GET", "/server_info")):
            assert (await other.http.request(method, path)).status_code == 401
            headers = {"Authorization": "Bearer secret"}
            assert (await other.http.request(method, path, headers=headers)).status_code == 200
