"""A router fetches the model card of each replica and builds one hasher of equal cards."""

import asyncio
from contextlib import AsyncExitStack
from threading import Event
from types import SimpleNamespace

import msgspec
import pytest
from octavo_server.kv.card import KVModelCard
from octavo_server.kv.frames import Hello
from octavo_server.router.fleet.endpoint import Endpoint
from octavo_server.router.fleet.replica import Replica
from octavo_server.router.prompts import prompt_hashers as readers_module
from octavo_server.router.prompts.prompt_hasher import PromptHasher
from octavo_server.router.prompts.prompt_hashers import PromptHashers
from octavo_testing.fake_replica import FakeReplica
from octavo_testing.fleets import until
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_REPLICAS = 20


class Counted(PromptHasher):
    num_made = 0

    @classmethod
    def from_card(cls, card):
        Counted.num_made += 1
        return super().from_card(card)


class Slow(PromptHasher):
    """Builds the hasher of the card `slow` only after a signal."""

    has_begun, may_end = Event(), Event()

    @classmethod
    def from_card(cls, card):
        if card.fingerprint == "slow":
            cls.has_begun.set()
            assert cls.may_end.wait(240)
        return super().from_card(card)


@pytest.fixture
def fleet():
    replicas = []
    return SimpleNamespace(on_change=[], notify_change=lambda _: None, replicas=replicas, routable=lambda _: replicas)


def joined(url, name, fingerprint):
    replica = Replica(Endpoint(url, name))
    replica.hello = Hello(
        version=1,
        epoch=1,
        block_size=16,
        root=b"",
        max_model_len=512,
        models=[MODEL],
        heartbeat_s=1.0,
        card=fingerprint,
    )
    replica.state = "exact"
    return replica


@pytest.mark.parametrize("is_named", [True, False], ids=["named in the hello", "not named"])
async def test_replicas_with_equal_cards_share_one_hasher(fleet, tmp_path, monkeypatch, is_named):
    monkeypatch.setattr(Counted, "num_made", 0)
    monkeypatch.setattr(readers_module, "PromptHasher", Counted)
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served:
        card = (await served.http.get("/kv/model")).content
    fingerprint = msgspec.msgpack.decode(card, type=KVModelCard).fingerprint
    readers = PromptHashers(fleet, dict)
    async with AsyncExitStack() as stack:
        await readers.start()
        stack.push_async_callback(readers.stop)
        for number in range(NUM_REPLICAS):
            fake = FakeReplica()
            fake.bodies["/kv/model"] = card
            await fake.start()
            stack.push_async_callback(fake.stop)
            fleet.replicas.append(joined(fake.url, f"r{number}", fingerprint if is_named else ""))
        for replica in fleet.replicas:
            readers._on_replica_change(replica)
        await until(lambda: len(readers._fingerprints) == NUM_REPLICAS)
        assert Counted.num_made == 1
        assert isinstance(readers.hasher_for(MODEL), Counted)
        for replica in fleet.replicas:
            replica.state = "gone"
            readers._on_replica_change(replica)
        assert readers.hasher_for(MODEL) is None
        await asyncio.gather(*readers._tasks)


async def test_a_hasher_that_is_still_being_built_is_not_dropped(fleet, tmp_path, monkeypatch):
    monkeypatch.setattr(readers_module, "PromptHasher", Slow)
    async with serving(ScriptedClient(write_byte_model(tmp_path))) as served:
        card = msgspec.msgpack.decode((await served.http.get("/kv/model")).content, type=KVModelCard)
    readers = PromptHashers(fleet, dict)
    async with AsyncExitStack() as stack:
        await readers.start()
        stack.push_async_callback(readers.stop)
        for name in ("slow", "quick"):
            fake = FakeReplica()
            fake.bodies["/kv/model"] = msgspec.msgpack.encode(msgspec.structs.replace(card, fingerprint=name))
            await fake.start()
            stack.push_async_callback(fake.stop)
            fleet.replicas.append(joined(fake.url, name, name))
        readers._on_replica_change(fleet.replicas[0])
        await until(Slow.has_begun.is_set)
        readers._on_replica_change(fleet.replicas[1])
        await until(lambda: "quick" in readers._fingerprints)
        Slow.may_end.set()
        await until(lambda: "slow" in readers._fingerprints)
        fleet.replicas.pop()
        assert isinstance(readers.hasher_for(MODEL), Slow)
