"""The two servers under attack, each started once for a module."""

import httpx
import pytest_asyncio
from octavo_testing.attack_targets import engine_target, router_target
from octavo_testing.recording_replica import RecordingReplica


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["route", "serve"])
async def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "serve":
        attacked = engine_target(folder)
    else:
        attacked = router_target(folder, [RecordingReplica(), RecordingReplica()])
    async with attacked as server:
        async with httpx.AsyncClient() as http:  # the first requests load and allocate what the server then keeps
            body = {"messages": [{"role": "user", "content": "hi"}] * 4096, "max_tokens": 1}
            await http.post(f"http://127.0.0.1:{server.port}/v1/chat/completions", json=body)
        yield server
