"""Every fault of a replica or the network between a fleet and its replicas, and its effect."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from octavo_server.kv import publisher as publishing
from octavo_server.kv.frames import MAX_FRAME_BYTES
from octavo_server.router.fleet.kv_stream_client import FollowSettings
from octavo_server.router.fleet.prefix_index import Match
from octavo_testing.fake_replica import MODEL, FakeReplica, Lose, Reorder, Repeat, lie, twice
from octavo_testing.fleets import running_fleet, until

pytestmark = pytest.mark.slow


@asynccontextmanager
async def exact_pair(heartbeat_s=0.05, **settings):
    """A fake replica with some blocks, the fleet that follows it, and the exact `Replica`."""
    fake = FakeReplica(heartbeat_s=heartbeat_s)
    fake.step(stored=[1, 2, 3])
    async with running_fleet(fake, **settings) as fleet:
        await until(lambda: fleet.routable(MODEL))
        yield fake, fleet, fleet.replicas[0]


def states_of(fleet):
    """Record the changes of state from now on, without changes of readiness."""
    seen = []
    fleet.on_change.append(lambda replica: seen.append(replica.state) if seen[-1:] != [replica.state] else None)
    return seen


def found(fleet, replica, hashes):
    slot = replica.blocks.slot
    return replica.is_exact and fleet.index.match(hashes, [slot]).get(slot) == Match(len(hashes))


@pytest.mark.parametrize("spoiler", [Lose, Repeat, Reorder, lambda: lie], ids=["lost", "again", "order", "lie"])
async def test_a_faulty_frame_breaks_the_copy_and_a_snapshot_restores_it(spoiler):
    async with exact_pair() as (fake, fleet, replica):
        seen, slot = states_of(fleet), replica.blocks.slot
        fake.spoil = spoiler()
        fake.step(stored=[4])
        fake.step(stored=[5])
        await until(lambda: replica.num_faults)
        assert seen == ["blind"], "it may be sent to all the while"
        fake.spoil = None
        await until(lambda: found(fleet, replica, [1, 2, 3, 4, 5]))
        assert set(seen) == {"blind", "exact"}
        assert replica.blocks.slot != slot


async def test_a_repeated_frame_changes_nothing():
    async with exact_pair() as (fake, fleet, replica):
        fake.spoil = twice
        fake.step(stored=[4])
        fake.step(stored=[5], removed=[1])
        await until(lambda: found(fleet, replica, [2, 3, 4, 5]))
        assert (replica.num_faults, replica.blocks.num_blocks) == (0, 4)


async def test_a_replica_with_constant_faults_gets_requests_while_blind():
    async with exact_pair() as (fake, fleet, replica):
        fake.spoil = lie
        await until(lambda: replica.num_faults >= 4)
        assert fleet.routable(MODEL) == [replica]


async def test_a_long_exact_stream_resets_the_backoff():
    """Otherwise the tenth fault in a long time would cost as much as ten in a row: 2^9 times 10 ms."""
    settings = FollowSettings(least_wait_s=0.01, most_wait_s=60, stable_s=1e-6)
    async with exact_pair(settings=settings) as (fake, fleet, replica):
        for block in range(10, 20):
            fake.spoil = lie
            await until(lambda: replica.num_faults)
            fake.spoil, replica.num_faults = None, 0
            fake.step(stored=[block])
            await until(lambda block=block: found(fleet, replica, [block]), limit_s=2.0)


async def test_a_killed_replica_gets_no_requests_until_its_new_epoch_is_known():
    async with exact_pair() as (fake, fleet, replica):
        seen, epoch = states_of(fleet), replica.admitted_epoch
        await fake.kill()
        await until(lambda: replica.state == "connecting")
        assert fleet.routable(MODEL) == []
        assert fleet.models() == [MODEL], "a restart doesn't take the model away"
        fake.begin()
        fake.step(stored=[7])
        await fake.start()
        await until(lambda: found(fleet, replica, [7]))
        assert seen == ["connecting", "loading", "exact"]
        assert replica.admitted_epoch != epoch


async def test_a_restart_at_the_same_address_drops_the_old_epoch():
    async with exact_pair() as (fake, fleet, replica):
        epoch = replica.admitted_epoch
        await fake.restart()
        await until(lambda: replica.admitted_epoch != epoch)
        assert fleet.index.match([1, 2, 3], [replica.blocks.slot]) == {}
        await until(lambda: len(fleet.index) == 0)


async def test_a_broken_connection_alone_costs_no_admission():
    """A proxy may have restarted: with the same epoch, the replica gets requests as soon as it answers."""
    async with exact_pair() as (fake, fleet, replica):
        seen = states_of(fleet)
        await fake.kill()
        await fake.start()
        await until(lambda: replica.num_faults == 0 and found(fleet, replica, [1, 2, 3]))
        assert seen in (["connecting", "blind", "exact"], ["blind", "exact"])


async def test_a_hung_replica_gets_no_requests_until_it_resumes():
    async with exact_pair() as (fake, fleet, replica):
        seen = states_of(fleet)
        fake.hang()
        await until(lambda: replica.state == "connecting")
        assert seen == ["blind", "connecting"]
        assert "/health" in fake.paths
        fake.wake()
        await until(lambda: found(fleet, replica, [1, 2, 3]))


async def test_a_silent_replica_is_the_last_choice_until_its_health_is_known():
    hung, other = FakeReplica(heartbeat_s=0.05), FakeReplica(heartbeat_s=0.05)
    async with running_fleet(hung, other) as fleet:
        await until(lambda: len(fleet.routable(MODEL)) == 2)
        first, second = fleet.replicas if fleet.replicas[0].url == hung.url else fleet.replicas[::-1]
        seen = []
        fleet.on_change.append(lambda _: seen.append((first.state, [*fleet.routable(MODEL)])))
        hung.hang()
        await until(lambda: first.state == "connecting")
        assert {state for state, _ in seen} == {"blind", "connecting"}
        assert all(routable == [second] for _, routable in seen)
        other.hang()
        await until(lambda: second.state == "blind")
        assert fleet.routable(MODEL) == [second]
        other.wake()
        await until(lambda: second.is_exact and fleet.routable(MODEL) == [second])


async def test_a_paused_stream_resumes_without_a_new_snapshot():
    async with exact_pair() as (fake, fleet, replica):
        seen = states_of(fleet)
        pause = asyncio.Event()
        fake.spoil = lambda frame: () if not pause.is_set() else (frame,)
        await until(lambda: replica.state == "blind" and "/health" in fake.paths)
        assert fleet.routable(MODEL) == [replica]
        pause.set()
        await until(lambda: found(fleet, replica, [1, 2, 3]))
        assert (seen, fake.num_connections) == (["blind", "exact"], 1)


async def test_a_silent_stream_of_a_healthy_replica_is_reopened():
    async with exact_pair() as (fake, fleet, _):
        seen = states_of(fleet)
        fake.spoil = lambda frame: ()
        await until(lambda: fake.num_connections > 1)
        assert "exact" not in seen or seen[0] == "blind"


async def test_a_drain_of_a_replica_is_known_at_once():
    async with exact_pair() as (fake, fleet, replica):
        fake.publisher.set_accepts(False)
        await until(lambda: fleet.routable(MODEL) == [])
        assert replica.is_exact
        fake.publisher.set_accepts(True)
        await until(lambda: fleet.routable(MODEL) == [replica])


async def test_an_oversized_frame_ends_only_the_connection():
    async with exact_pair() as (fake, fleet, replica):
        for listener in fake.publisher._listeners:
            listener.push((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        await until(lambda: replica.num_faults == 1)
        await until(lambda: found(fleet, replica, [1, 2, 3]))


async def test_an_unsupported_stream_version_is_logged_once(caplog):
    """A replica of a later version gets no requests; the log line gives the reason."""
    fake = FakeReplica()
    fake.publisher._hello.version = 99
    async with running_fleet(fake) as fleet:
        await until(lambda: fleet.replicas and fleet.replicas[0].num_faults > 3)
        assert fleet.replicas[0].state == "connecting"
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "is connecting: " in line.message
    assert "version 99" in line.message


async def test_a_hundred_simultaneous_replicas_are_all_admitted():
    fakes = [FakeReplica(heartbeat_s=0.5) for _ in range(100)]
    for number, fake in enumerate(fakes):
        fake.step(stored=range(1 + 100 * number, 101 + 100 * number))
    async with running_fleet(*fakes, settings=FollowSettings()) as fleet:
        await until(lambda: len(fleet.routable(MODEL)) == 100)
        slots = {replica.blocks.slot for replica in fleet.replicas}
        assert len(slots) == 100
        assert len(fleet.index) == 100 * 100


async def test_no_request_is_sent_before_the_snapshot_is_complete(monkeypatch):
    monkeypatch.setattr(publishing, "PART_HASHES", 10)
    fake = FakeReplica()
    fake.step(stored=range(1, 1001))
    async with running_fleet(fake) as fleet:
        early = []
        fleet.on_load_update.append(lambda replica: early.append(replica.is_routable) if not replica.is_exact else None)
        await until(lambda: fleet.routable(MODEL))
        assert len(early) > 100
        assert not any(early)


async def test_a_dropped_slow_reader_connects_again():
    async with exact_pair() as (fake, fleet, replica):
        seen = states_of(fleet)
        for listener in fake.publisher._listeners:
            listener.push(bytes(listener._max_backlog_bytes + 1))
        await until(lambda: fake.num_connections == 2 and found(fleet, replica, [1, 2, 3]))
        assert seen == ["blind", "exact"]


async def test_a_replica_that_announces_its_end_gets_no_requests():
    async with exact_pair() as (fake, fleet, replica):
        seen = states_of(fleet)
        fake.status["/kv/events"] = 503
        fake.publisher.close("the replica is shutting down")
        await until(lambda: seen)
        assert (seen, replica.why) == (["connecting"], "the replica is shutting down")
        assert fleet.routable(MODEL) == []


async def test_clock_jumps_change_nothing(monkeypatch):
    """Frames carry no time and the router reads no wall clock, so skews and steps of clocks have no effect."""
    async with exact_pair(heartbeat_s=0.3) as (fake, fleet, replica):  # a busy machine delays some
        seen, updates = states_of(fleet), []
        fleet.on_load_update.append(updates.append)
        for days in (-400, 400, 0):
            monkeypatch.setattr(time, "time", lambda days=days: 1e9 + 86_400 * days)
            updates.clear()
            await until(lambda: len(updates) > 3)
        fake.step(stored=[4])
        await until(lambda: found(fleet, replica, [1, 2, 3, 4]))
        assert seen == []
