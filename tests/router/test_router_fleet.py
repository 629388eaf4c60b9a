"""The fleet over real replicas: a real scheduler in an engine core process behind a real server."""

import pytest
from octavo_engine.wire.hashing import block_hashes, scoped_root, short_hash
from octavo_engine.wire.kv_stream import numbers
from octavo_engine.wire.records import TenantUsage
from octavo_server.kv.frames import TenantLoad
from octavo_server.router.fleet.prefix_index import Match
from octavo_testing.core_process import running
from octavo_testing.fake_replica import FakeReplica
from octavo_testing.fleets import fleet_at, running_fleet, until
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


async def test_the_work_of_tenants_is_known_in_the_present_epoch():
    fake = FakeReplica()
    async with running_fleet(fake) as fleet:
        fake.publisher.add_request("early", 5)
        await until(lambda: fleet.replicas and fleet.replicas[0].tenants)
        (replica,) = fleet.replicas
        fake.publisher.add_request("late", 7)
        fake.step(running=1, tenants={"late": TenantUsage(running=1, generation_tokens=2)})
        await until(lambda: len(replica.tenants) == 2)
        assert replica.tenants == {"early": TenantLoad(0, 1, 1, 5, 1), "late": TenantLoad(1, 1, 1, 9, 1)}
        fake.publisher._tenants.loads["early"] = TenantLoad(0, 1)  # its minute is over
        fake.publisher.end_request("early")
        await until(lambda: len(replica.tenants) == 1)
        await fake.restart()
        await until(lambda: not replica.tenants)


async def test_a_stopped_server_gets_no_requests(core_config):
    async with running(core_config) as llm, serving(llm) as started:
        async with fleet_at(started.url) as fleet:
            await until(lambda: fleet.routable(MODEL))
            (replica,) = fleet.replicas
            await started.stop()
            await until(lambda: not fleet.routable(MODEL))
        assert (replica.state, replica.blocks) == ("gone", None)
