"""A router fetches a replica's model card before it sends requests, unless there is none."""

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web
from octavo_server.kv.card import model_card, write_card
from octavo_server.router.fleet.endpoint import StaticDiscovery
from octavo_server.router.fleet.fleet import Fleet
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.fleet.prefix_index import PrefixIndex
from octavo_server.router.prompts.prompt_hashers import MAX_CARD_BYTES, PromptHashers
from octavo_testing.fake_replica import MODEL, FakeReplica
from octavo_testing.fleets import until
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL as SCRIPTED
from octavo_testing.server import ScriptedClient, serving


@asynccontextmanager
async def reading(*urls):
    fleet = Fleet(FollowSettings(), StaticDiscovery(urls), PrefixIndex(max_entries=1000))
    readers = PromptHashers(fleet, dict)
    await readers.start()
    await fleet.start()
    try:
        yield fleet, readers
    finally:
        await fleet.stop()
        await readers.stop()


@pytest.fixture
async def fake():
    replica = FakeReplica()
    await replica.start()
    yield replica
    await replica.stop()


async def test_the_first_request_is_hashed_as_by_the_replica(tmp_path):
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served, reading(served.url) as (fleet, readers):
        unread = []
        fleet.on_change.append(
            lambda replica: unread.append(replica.is_routable and readers.hasher_for(SCRIPTED) is None)
        )
        await until(lambda: fleet.routable(SCRIPTED))
        assert readers.hasher_for(SCRIPTED) is not None
        assert True not in unread


@pytest.mark.parametrize("status", [404, 500, 200], ids=["no card", "an error", "no card that can be read"])
async def test_a_replica_without_a_model_card_gets_requests(fake, status):
    fake.status["/kv/model"] = status
    async with reading(fake.url) as (fleet, readers):
        await until(lambda: fleet.routable(MODEL))
        assert "/kv/model" in fake.paths
        assert readers.hasher_for(MODEL) is None


async def test_a_card_is_read_up_to_its_limit(fake, caplog):
    piece, num_sent = bytes(2**20), 0

    async def send_without_end(request):
        nonlocal num_sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while num_sent < 4 * MAX_CARD_BYTES:
            await answer.write(piece)
            num_sent += len(piece)
        return answer

    fake.answers["/kv/model"] = send_without_end
    async with reading(fake.url) as (fleet, readers):
        await until(lambda: fleet.routable(MODEL))
        assert readers.hasher_for(MODEL) is None
    assert MAX_CARD_BYTES <= num_sent < 2 * MAX_CARD_BYTES
    assert f"more than {MAX_CARD_BYTES} bytes" in caplog.text
    assert fake.paths.count("/kv/model") == 1


async def test_one_card_of_a_hundred_replicas_is_fetched_once(tmp_path):
    client = ScriptedClient(write_byte_model(tmp_path))
    card = model_card(client, (MODEL,), cache_isolation=False)
    async with AsyncExitStack() as stack:
        fakes = [FakeReplica(card=card.fingerprint) for _ in range(100)]
        for fake in fakes:
            fake.bodies["/kv/model"] = write_card(card)
            await fake.start()
            stack.push_async_callback(fake.stop)
        fleet, readers = await stack.enter_async_context(reading(*[fake.url for fake in fakes]))
        await until(lambda: len(fleet.routable(MODEL)) == 100)
        assert sum(fake.paths.count("/kv/model") for fake in fakes) == 1
        assert readers.hasher_for(MODEL) is not None
