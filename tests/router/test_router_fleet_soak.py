"""Random faults, in turn and together: an exact copy always equals the replica's blocks."""

import asyncio
import random

import pytest
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_testing.fake_replica import MODEL, FakeReplica, Lose, Reorder, Repeat, lie, twice
from octavo_testing.fleets import running_fleet, until

pytestmark = pytest.mark.slow

QUICK = FollowSettings(
    answer_timeout_s=0.1, poll_every_s=0.02, reopen_after_s=0.2, least_wait_s=0.001, most_wait_s=0.01
)
SPOILERS = (Lose, Repeat, Reorder, lambda: lie, lambda: twice)


class Soak:
    """Two replicas with disjoint block numbers, and random actions on them."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.fakes = [FakeReplica(heartbeat_s=0.02) for _ in range(2)]
        self.fresh = iter(range(1, 10**9))

    async def act(self):
        fake = self.dice.choice(self.fakes)
        kind = self.dice.choices(["step", "spoil", "clean", "hang", "restart", "reset"], [12, 3, 2, 1, 1, 1])[0]
        if kind == "step":
            has = sorted(fake.publisher.kv_set.device)
            gone = self.dice.sample(has, min(len(has), self.dice.randrange(4)))
            fake.step(stored=[next(self.fresh) for _ in range(self.dice.randrange(4))], removed=gone, running=1)
        elif kind == "spoil":
            fake.spoil = self.dice.choice(SPOILERS)()
        elif kind == "clean":
            fake.spoil = None
        elif kind == "hang":
            fake.hang()
        elif kind == "restart":
            await fake.restart()
        else:
            fake.step(removed=sorted(fake.publisher.kv_set.device))
        if kind != "hang" and self.dice.random() < 0.5:
            fake.wake()
        await asyncio.sleep(self.dice.choice([0, 0, 0.001, 0.01, 0.05]))

    def heal(self):
        for fake in self.fakes:
            fake.spoil = None
            fake.wake()


def has(index, replica):
    slot = replica.blocks.slot
    known = {h for part in (*index._young, *index._old) for h in part}
    return {h for h in known if index.match([h], [slot])}


@pytest.mark.parametrize("seed", range(4))
async def test_the_index_is_exact_after_any_sequence_of_faults(seed):
    soak = Soak(seed)
    async with running_fleet(*soak.fakes, settings=QUICK) as fleet:
        index = fleet.index
        for _ in range(80):
            await soak.act()
        soak.heal()
        by_url = {fake.url: fake for fake in soak.fakes}
        for replica in fleet.replicas:
            kept = by_url[replica.url].publisher.kv_set
            await until(lambda replica=replica, kept=kept: replica.is_exact and has(index, replica) == kept.device)
        assert len(fleet.routable(MODEL)) == 2
        await until(lambda: len(index) == sum(len(fake.publisher.kv_set.device) for fake in soak.fakes))
