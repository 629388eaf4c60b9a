"""The fleet over real replicas: a real scheduler in an engine core process behind a real server."""

from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from octavo_engine.config import EngineConfig
from octavo_engine.wire.hashing import block_hashes, scoped_root, short_hash
from octavo_engine.wire.kv_stream import numbers
from octavo_server.router.discovery.static import StaticDiscovery
from octavo_server.router.fleet import Fleet
from octavo_server.router.follower import FollowSettings
from octavo_server.router.prefix_index import Match, PrefixIndex
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.fleets import until
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "The quick brown fox jumps over the lazy dog, and then over all the other dogs, too."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    with scripted_environment():
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder):
    config = EngineConfig(model=str(folder), load_format="dummy", max_model_len=256)
    async with running(config) as llm, serving(llm) as started:
        yield started


@asynccontextmanager
async def following(*urls):
    fleet = Fleet(FollowSettings(), StaticDiscovery(urls), PrefixIndex(max_entries=100_000))
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.stop()


async def test_what_a_replica_stores_is_found_in_the_index(server):
    async with following(server.url) as fleet:
        await until(lambda: fleet.routable(MODEL))
        (replica,) = fleet.routable(MODEL)
        assert (replica.state, fleet.models()) == ("exact", [MODEL])
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        (request,) = (await server.http.post("/v1/completions/render", json=body)).json()
        root = scoped_root(replica.hello.root, "", "")
        hashes = [numbers(short_hash(h))[0] for h in block_hashes(root, request["token_ids"], 16)]
        await server.http.post("/v1/completions", json=body)
        slot = replica.blocks.slot
        await until(lambda: fleet.index.match(hashes, [slot]) == {slot: Match(len(hashes))})


async def test_a_server_that_ends_is_not_sent_to(folder):
    config = EngineConfig(model=str(folder), load_format="dummy", max_model_len=256)
    async with running(config) as llm, serving(llm) as started:
        async with following(started.url) as fleet:
            await until(lambda: fleet.routable(MODEL))
            (replica,) = fleet.replicas
            await started.stop()
            await until(lambda: not fleet.routable(MODEL))
        assert (replica.state, replica.blocks) == ("gone", None)
