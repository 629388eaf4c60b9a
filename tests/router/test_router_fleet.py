"""The fleet over real replicas: a real scheduler in an engine core process behind a real server."""

import pytest
from octavo_engine.wire.hashing import block_hashes, scoped_root, short_hash
from octavo_engine.wire.kv_stream import numbers
from octavo_server.router.fleet.prefix_index import Match
from octavo_testing.core_process import running
from octavo_testing.fleets import fleet_at, until
from octavo_testing.server import MODEL, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "The quick brown fox jumps over the lazy dog, and then over all the other dogs, too."


async def test_stored_blocks_are_found_in_the_index(core_server):
    async with fleet_at(core_server.url) as fleet:
        await until(lambda: fleet.routable(MODEL))
        (replica,) = fleet.routable(MODEL)
        assert (replica.state, fleet.models()) == ("exact", [MODEL])
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        (request,) = (await core_server.http.post("/v1/completions/render", json=body)).json()
        root = scoped_root(replica.hello.root, "", "")
        hashes = [numbers(short_hash(h))[0] for h in block_hashes(root, request["token_ids"], 16)]
        await core_server.http.post("/v1/completions", json=body)
        slot = replica.blocks.slot
        await until(lambda: fleet.index.match(hashes, [slot]) == {slot: Match(len(hashes))})


async def test_a_stopped_server_gets_no_requests(core_config):
    async with running(core_config) as llm, serving(llm) as started:
        async with fleet_at(started.url) as fleet:
            await until(lambda: fleet.routable(MODEL))
            (replica,) = fleet.replicas
            await started.stop()
            await until(lambda: not fleet.routable(MODEL))
        assert (replica.state, replica.blocks) == ("gone", None)
