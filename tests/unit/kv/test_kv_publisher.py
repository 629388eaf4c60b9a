"""The publisher without engine and HTTP: the set that a listener rebuilds must equal the publisher's."""

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.kv_stream import KVChange, KVSet, numbers, roll, run_together
from octavo_engine.wire.records import EngineRequest, EngineStats, TenantUsage
from octavo_engine.wire.sampling import SamplingParams
from octavo_server.http.access import MAX_TENANT_CHARS
from octavo_server.kv import publisher as publishing
from octavo_server.kv.frames import AdapterFile, Bye, FrameReader, Hello, Part, Snapshot, Step, TenantLoad
from octavo_server.kv.pending_prompts import full_blocks
from octavo_server.kv.publisher import KVPublisher, TenantWindow
from octavo_testing.clock import Clock
from octavo_testing.scripted import ready_info

READY = ready_info(EngineConfig())


class StreamReader:
    """The set that a listener has rebuilt so far."""

    def __init__(self):
        self.reader, self.set, self.frames = FrameReader(), KVSet(), []

    def feed(self, data):
        for frame in self.reader.feed(data):
            self.frames.append(frame)
            if isinstance(frame, Part):
                self.set.device.update(numbers(frame.device))
                self.set.host.update(numbers(frame.host))
            elif isinstance(frame, Snapshot):
                self.set.digest = roll(roll(0, "device", self.set.device), "host", self.set.host)
                self.set.is_exact = self.set.digest == frame.digest
            elif isinstance(frame, Step):
                change = KVChange(
                    stored=frame.stored, removed=frame.removed, host_stored=frame.host_stored,
                    host_removed=frame.host_removed, digest=frame.digest,
                )  # fmt: skip
                self.set.apply(change)
        return self


class Engine:
    """Stores and removes blocks, and publishes the changes as a core does."""

    def __init__(self, publisher):
        self.publisher, self.digest = publisher, 0

    def step(self, *, stored=(), removed=(), host_stored=(), **stats):
        self.digest = roll(roll(self.digest, "device", (*stored, *removed)), "host", host_stored)
        change = KVChange(
            stored=run_together(stored), removed=run_together(removed), host_stored=run_together(host_stored),
            digest=self.digest,
        )  # fmt: skip
        is_change = stored or removed or host_stored
        self.publisher.publish(change if is_change else None, EngineStats(**stats))


def made(**settings):
    publisher = KVPublisher(READY, ("m",), **settings)
    return publisher, Engine(publisher)


async def read_until(frames, reader, until):
    while not until(reader):
        reader.feed(await anext(frames))


async def test_changes_of_adapters_are_published_and_part_of_the_next_hello():
    publisher, engine = made()
    reader, late = StreamReader(), StreamReader()
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
        assert reader.frames[0].adapters == {}
        publisher.set_adapters({"a": "hash"})
        engine.step(stored=[1])
        publisher.set_adapters({})
        await read_until(frames, reader, lambda t: len(t.frames) == 5)
    assert [frame.adapters for frame in reader.frames[2:]] == [{"a": "hash"}, None, {}]
    publisher.set_adapters({"b": "hash"})
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, late, lambda t: t.frames)
    assert late.frames[0].adapters == {"b": "hash"}


async def test_the_state_of_the_file_of_adapters_is_published_and_part_of_the_next_hello():
    publisher, _ = made()
    reader, late = StreamReader(), StreamReader()
    failed = AdapterFile("1234", {"a": "rank 64"})
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
        publisher.set_adapter_file(failed)
        await read_until(frames, reader, lambda t: len(t.frames) == 3)
    assert [reader.frames[0].adapter_file, reader.frames[2].adapter_file] == [None, failed]
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, late, lambda t: t.frames)
    assert late.frames[0].adapter_file == failed


async def test_a_late_listener_gets_a_snapshot_and_then_each_change():
    publisher, engine = made()
    engine.step(stored=range(1, 4), host_stored=[9])
    reader = StreamReader()
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
        hello, end = reader.frames[0], reader.frames[-1]
        assert isinstance(hello, Hello)
        assert (hello.root, hello.block_size, hello.models) == (READY.hash_root, READY.block_size, ["m"])
        assert hello.revision == READY.revision == "scripted-commit"
        assert (reader.set.device, reader.set.host, reader.set.is_exact) == ({1, 2, 3}, {9}, True)
        engine.step(stored=[5], removed=[1])
        engine.step(running=2, prefill_backlog_tokens=70)
        await read_until(frames, reader, lambda t: isinstance(t.frames[-1], Step) and t.frames[-1].seq == end.seq + 2)
    assert [f.seq for f in reader.frames[-2:]] == [end.seq + 1, end.seq + 2]
    assert {f.epoch for f in reader.frames if not isinstance(f, Part)} == {hello.epoch}
    assert reader.frames[-1].load.prefill_backlog_tokens == 70
    assert (reader.set.device, reader.set.is_exact) == ({2, 3, 5}, True)
    assert publisher.num_listeners == 0


async def test_changes_during_a_snapshot_follow_it(monkeypatch):
    monkeypatch.setattr(publishing, "PART_HASHES", 2)
    publisher, engine = made()
    engine.step(stored=range(1, 8))
    reader = StreamReader()
    async with aclosing(publisher.frames()) as frames:
        reader.feed(await anext(frames)).feed(await anext(frames))
        engine.step(stored=[100], removed=[1, 7])
        await read_until(frames, reader, lambda t: isinstance(t.frames[-1], Step))
    assert sum(isinstance(frame, Part) for frame in reader.frames) == 4
    assert (reader.set.device, reader.set.is_exact) == ({2, 3, 4, 5, 6, 100}, True)


async def test_a_step_without_changes_is_not_sent_but_heartbeats_are():
    publisher, engine = made(heartbeat_s=0.01)
    engine.step(running=1)
    reader = StreamReader()
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
        engine.step(running=1, batched_tokens=1)
        await read_until(frames, reader, lambda t: isinstance(t.frames[-1], Step))
    assert reader.frames[-1].seq == reader.frames[-2].seq
    assert reader.frames[-1].load.step_tokens == 1
    assert reader.set.is_exact


async def test_only_a_slow_reader_is_dropped_with_a_reason():
    publisher, engine = made()
    publisher.max_backlog_bytes = 2000
    slow, quick = StreamReader(), StreamReader()
    async with aclosing(publisher.frames()) as slow_frames, aclosing(publisher.frames()) as quick_frames:
        for reader, frames in ((slow, slow_frames), (quick, quick_frames)):
            await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
        for block in range(1, 51):
            engine.step(stored=[block])
            await read_until(quick_frames, quick, lambda t, seq=block: getattr(t.frames[-1], "seq", 0) == seq)
        await read_until(slow_frames, slow, lambda t: isinstance(t.frames[-1], Bye))
        assert await anext(slow_frames, None) is None
        assert publisher.num_listeners == 1
    assert slow.frames[-1].reason == "slow reader: more than 2000 bytes behind; connect again"
    assert (quick.set.device, quick.set.is_exact) == (set(range(1, 51)), True)


async def test_a_wrong_copy_in_the_api_process_fails_the_digest():
    publisher, engine = made()
    engine.step(stored=[1, 2])
    publisher.kv_set.device.discard(2)
    reader = StreamReader()
    for frame in publisher.snapshot():
        reader.feed(frame)
    assert not reader.set.is_exact


async def test_a_cancelled_listener_leaves_while_a_frame_arrives():
    publisher, engine = made()
    frames = publisher.frames()
    reader = StreamReader()
    await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
    waiting = asyncio.create_task(anext(frames))
    await asyncio.sleep(0)
    engine.step(stored=[1])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert publisher.num_listeners == 0


async def test_a_large_change_is_split_into_small_frames(monkeypatch):
    monkeypatch.setattr(publishing, "PART_HASHES", 3)
    for count in (1, 3, 4, 6, 7):
        publisher, engine = made()
        reader = StreamReader()
        async with aclosing(publisher.frames()) as frames:
            while not reader.set.is_exact or not any(isinstance(f, Snapshot) for f in reader.frames):
                reader.feed(await anext(frames))
            engine.step(stored=range(1, count + 1), host_stored=range(100, 102))
            engine.step(removed=range(1, count + 1))
            while not reader.set.host or reader.set.device:
                reader.feed(await anext(frames))
                assert reader.set.is_exact
        steps = [f for f in reader.frames if isinstance(f, Step)]
        assert [f.seq for f in steps] == [*range(1, 2 * -(-count // 3) + 1)]


def figures(frame):
    load = frame.load
    return load.received, load.waiting, load.prefill_backlog_tokens, load.waiting_cached_tokens


def request(num_tokens, **fields):
    return EngineRequest(request_id="r", prompt_token_ids=[*range(num_tokens)], params=SamplingParams(), **fields)


async def test_a_request_is_announced_at_once_and_counted_once():
    """The core receives the request after its current step, and its load includes it then."""
    publisher, engine = made()
    reader = StreamReader()
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
        for tokens in (30, 100):
            publisher.announce_request(request(tokens))
        engine.step(stored=[1])  # the end of a step during which they arrived
        engine.step(running=1, received=1, prefill_backlog_tokens=30, stored=[2])
        publisher.announce_request(request(1000))
        engine.step(running=1, waiting=2, received=3, prefill_backlog_tokens=1100)
        engine.step(running=4, received=3)
        await read_until(frames, reader, lambda t: t.frames[-1].load.running == 4)
    steps = [figures(frame) for frame in reader.frames if isinstance(frame, Step)]
    assert steps == [
        *[(1, 1, 30, 0), (2, 2, 130, 16), (2, 2, 130, 16)],
        *[(2, 1, 130, 16), (3, 2, 1130, 16 + 96), (3, 2, 1100, 16 + 96), (3, 0, 0, 0)],
    ]


async def test_coming_blocks_are_announced_once_with_the_request():
    publisher, engine = made()
    asked = request(70, cache_salt="s")
    blocks = full_blocks(asked, READY.hash_root, READY.block_size)
    publisher.announce_request(asked)
    engine.step(stored=blocks[:1], host_stored=blocks[1:2], received=1)
    reader = StreamReader()
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
        publisher.announce_request(asked)
        engine.step(received=1, running=1, waiting=1)
        await read_until(frames, reader, lambda t: t.frames[-1].load.running == 1)
        assert reader.set.is_exact
    steps = [frame for frame in reader.frames if isinstance(frame, Step)]
    assert [numbers(frame.coming) for frame in steps] == [blocks[2:], ()]
    assert [frame.load.waiting_cached_tokens for frame in steps] == [32, 32]


@pytest.mark.parametrize(("caches", "listens"), [(False, True), (True, False)])
async def test_no_prompt_is_hashed_without_a_cache_or_a_listener(monkeypatch, caches, listens):
    monkeypatch.setattr(publishing, "full_blocks", lambda *_: pytest.fail("it was"))
    publisher, _ = made(has_prefix_cache=caches)
    async with aclosing(publisher.frames()) as frames:
        if listens:
            await anext(frames)
        assert publisher.num_listeners == listens
        publisher.announce_request(request(100))


async def test_a_drain_is_published_at_once_and_persists():
    publisher, engine = made()
    reader = StreamReader()
    async with aclosing(publisher.frames()) as frames:
        reader.feed(await anext(frames))
        publisher.set_accepts(False)
        publisher.set_accepts(False)
        engine.step(stored=[1])
        while not reader.set.device:
            reader.feed(await anext(frames))
    assert [f.load.accepts for f in reader.frames if isinstance(f, Step)] == [False, False]


def test_the_window_of_a_tenant_has_the_work_of_the_last_minute():
    clock = Clock(100.0)
    window = TenantWindow(clock)
    window.add_request("a", 30)
    window.add_usage({"a": TenantUsage(running=1, prompt_tokens=30, generation_tokens=2), "b": TenantUsage()})
    assert window.loads == {"a": TenantLoad(running=1, unfinished=1, requests=1, tokens=32, received=1)}
    clock.now_s = 150.0
    window.add_request("a", 7)
    window.add_usage({"a": TenantUsage(running=-1, generation_tokens=1)})
    window.end_request("a")
    assert window.loads["a"] == TenantLoad(running=0, unfinished=1, requests=2, tokens=40, received=2)
    clock.now_s = 160.9
    window.expire()
    assert window.loads["a"].requests == 2  # no request counts for less than 60 s
    clock.now_s = 161.0
    window.expire()
    assert window.loads["a"] == TenantLoad(running=0, unfinished=1, requests=1, tokens=8, received=2)
    window.end_request("a")
    clock.now_s = 211.0
    window.expire()
    assert window.loads == {}
    assert window.take_changed() == {"a": TenantLoad(), "b": TenantLoad()}
    assert window.take_changed() == {}


events = st.tuples(
    st.sampled_from("abc"), st.sampled_from(["begin", "end", "tokens", "read", "wait"]), st.integers(0, 40)
)


@settings(max_examples=50)
@given(st.lists(events, max_size=60))
def test_a_reader_of_the_changes_has_the_loads_and_forgets_tenants_without_work(steps):
    clock, copy, unfinished = Clock(), {}, Counter()
    window = TenantWindow(clock)
    for name, event, number in steps:
        if event == "begin":
            unfinished[name] += 1
            window.add_request(name, number)
        elif event == "end" and unfinished[name]:
            unfinished[name] -= 1
            window.end_request(name)
        elif event == "tokens":
            window.add_usage({name: TenantUsage(generation_tokens=number)})
        elif event == "wait":
            clock.now_s += number
            window.expire()
        elif event == "read":
            copy |= {name: replace(load) for name, load in window.take_changed().items()}
    copy |= {name: replace(load) for name, load in window.take_changed().items()}
    assert {name: load for name, load in copy.items() if load != TenantLoad()} == window.loads
    clock.now_s += 61
    window.expire()
    assert window.loads.keys() == (+unfinished).keys()


async def test_the_work_of_tenants_is_published_in_parts_and_part_of_the_snapshot(monkeypatch):
    monkeypatch.setattr(publishing, "MAX_TENANTS", 3)
    publisher, engine = made()
    publisher.add_request("early", 5)
    publisher.end_request("early")
    assert publisher._tenants.changed == {}  # no router reads them
    reader, late = StreamReader(), StreamReader()
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
        assert reader.frames[0].tenant_window_s == 60
        for name in ("a", "b", "c", "d", "a"):
            publisher.add_request(name, 10)
        engine.step(tenants={"a": TenantUsage(running=1), "d": TenantUsage(running=1, generation_tokens=1)})
        await read_until(frames, reader, lambda t: "d" in getattr(t.frames[-1], "tenants", ()))
        async with aclosing(publisher.frames()) as late_frames:
            await read_until(late_frames, late, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
    assert [
        frame.tenants
        for frame in reader.frames
        if isinstance(frame, Part) or (isinstance(frame, Step) and frame.tenants)
    ] == [
        {"early": TenantLoad(requests=1, tokens=5, received=1)},
        {"a": TenantLoad(1, 2, 2, 20, 2), "b": TenantLoad(0, 1, 1, 10, 1), "c": TenantLoad(0, 1, 1, 10, 1)},
        {"d": TenantLoad(1, 1, 1, 11, 1)},
    ]
    assert reader.frames[-1].seq == len([frame for frame in reader.frames if isinstance(frame, Step) and frame.tenants])
    parts = [frame.tenants for frame in late.frames if isinstance(frame, Part)]
    assert ([len(part) for part in parts], set().union(*parts)) == ([3, 2], {"early", *"abcd"})


def test_a_snapshot_with_many_long_names_of_tenants_can_be_read():
    """A frame that is too long ends the stream for good: the router would only poll the replica."""
    publisher, _ = made()
    for i in range(4000):
        publisher.add_request(f"{i:\xff>{MAX_TENANT_CHARS}}", 2**31)
    reader = StreamReader().feed(b"".join(publisher.snapshot()))
    assert sum(len(frame.tenants) for frame in reader.frames if isinstance(frame, Part)) == 4000


async def test_changes_are_published_together_after_the_interval():
    publisher, _ = made()
    reader, clock = StreamReader(), asyncio.get_running_loop().time
    async with aclosing(publisher.frames()) as frames:
        await read_until(frames, reader, lambda t: t.frames and isinstance(t.frames[-1], Snapshot))
        before_s = clock()
        publisher.add_request("a", 1)
        await read_until(frames, reader, lambda t: isinstance(t.frames[-1], Step))
        for _ in range(5):
            publisher.add_request("a", 1)
        assert publisher._tenants_timer.when() >= before_s + publishing.TENANTS_EVERY_S
        await read_until(frames, reader, lambda t: t.frames[-1].seq == 2)
    published = [frame.tenants["a"].requests for frame in reader.frames if isinstance(frame, Step) and frame.tenants]
    assert published == [1, 6]
