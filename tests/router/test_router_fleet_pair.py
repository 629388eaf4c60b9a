"""Two routers that follow the same replicas over real connections: each learns of the other's requests."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.records import EngineRequest
from octavo_engine.wire.sampling import SamplingParams
from octavo_server.kv.pending_prompts import full_blocks
from octavo_server.router.balance.picker import Picker
from octavo_server.router.prompts.prompt import Prompt
from octavo_testing.fake_replica import MODEL, FakeReplica
from octavo_testing.fleets import fleet_at, running_fleet, until
from octavo_testing.scripted import ready_info

READY = ready_info(EngineConfig())
ASKED = EngineRequest(request_id="r", prompt_token_ids=[*range(1000)], params=SamplingParams(), cache_salt="tenant")
PROMPT = Prompt(
    num_tokens=1000,
    affinity=1,
    hashes=full_blocks(ASKED, READY.hash_root, READY.block_size),
    block_size=READY.block_size,
    is_exact=True,
)


class Router:
    def __init__(self, fleet):
        self.fleet = fleet
        self.picker = Picker(fleet.index, clock=asyncio.get_running_loop().time)
        fleet.on_load_update.append(self.picker.record_load)

    def pick(self):
        return self.picker.pick(PROMPT, self.fleet.routable(MODEL))


@asynccontextmanager
async def pair(*fakes):
    async with running_fleet(*fakes) as fleet, AsyncExitStack() as stack:
        other = await stack.enter_async_context(fleet_at(*(fake.url for fake in fakes)))
        await until(lambda: all(len(f.routable(MODEL)) == len(fakes) for f in (fleet, other)))
        yield Router(fleet), Router(other)


def have_received(*routers, received):
    return all(any(r.load.received == received for r in router.fleet.replicas) for router in routers)


async def test_a_new_prompt_follows_the_other_routers_choice():
    fakes = [FakeReplica() for _ in range(4)]
    async with pair(*fakes) as (one, other):
        chosen = one.pick()
        lease = one.picker.lease(chosen, PROMPT)
        fake = next(fake for fake in fakes if fake.url == chosen.chosen.url)
        fake.publisher.announce_request(ASKED)
        await until(lambda: have_received(one, other, received=1))
        sent = other.pick()
        assert (sent.chosen.url, sent.rung, sent.expected_tokens) == (fake.url, "predicted", 16 * len(PROMPT.hashes))
        assert one.pick().chosen is chosen.chosen
        lease.release("unknown")
        assert one.pick().expected_tokens == 0, "it was its own, and is predicted once"


async def test_a_queue_of_cached_prompts_costs_little():
    fake = FakeReplica()
    async with pair(fake) as (one, other):
        fake.step(stored=PROMPT.hashes)
        for _ in range(3):
            fake.publisher.announce_request(ASKED)
        await until(lambda: have_received(one, other, received=3))
        for router in (one, other):
            terms = router.pick().chosen_cost
            assert terms.queue_s == pytest.approx(3 * terms.prefill_s)
