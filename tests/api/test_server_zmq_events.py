"""vLLM's ZeroMQ events from a real scheduler in an engine core process, read by a subscriber as vLLM's examples are."""

import asyncio
import json
from dataclasses import replace

import msgspec
import pytest
import zmq
import zmq.asyncio
from octavo_engine.offline.llm import LLM
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.settings.records import KVEventsConfig
from octavo_engine.wire.errors import StartupError
from octavo_engine.wire.hashing import block_hashes, scoped_root, short_hash, tenant_salt
from octavo_engine.wire.kv_stream import KVChange, StoredBlock, numbers, run_together
from octavo_server.kv.zmq_events import END_OF_REPLAY, ZmqEvents, zmq_events
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.scripted import LOADER, text_ids, write_byte_model
from octavo_testing.server import MODEL, serving

SIZE = 16
TOPIC, PROBE = b"kv@here@scripted", b"?"
TEXT = "Sixteen letters."  # as long as a block


@pytest.fixture
def folder(tmp_path):
    folder = write_byte_model(tmp_path)
    with scripted_environment():
        yield folder


@pytest.fixture
def config(tmp_path):
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"ipc://{tmp_path}/pub",
        replay_endpoint=f"ipc://{tmp_path}/replay",
        topic=TOPIC.decode(),
    )


@pytest.fixture
async def subscriber(config):
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.subscribe(config.topic.encode())
        socket.connect(config.endpoint)
        yield Subscriber(socket)


class Subscriber:
    def __init__(self, socket) -> None:
        self._socket = socket
        self.batches = []

    async def joined(self, events):
        """Wait for a probe message: a late subscriber misses earlier messages."""
        async with asyncio.timeout(120):
            while not await self._socket.poll(50):
                events._publisher.send_multipart([TOPIC + PROBE, b"", b""])

    async def until(self, wanted):
        """Read events up to the first wanted one."""
        events = []
        async with asyncio.timeout(120):
            while not any(wanted(event) for event in events):
                topic, seq, payload = await self._socket.recv_multipart()
                if topic.endswith(PROBE):
                    continue
                assert topic == TOPIC
                self.batches.append((int.from_bytes(seq, "big"), payload))
                _, more, rank = msgspec.msgpack.decode(payload)
                assert rank == 0
                events += more
        return events


async def replayed(config, start, *before):
    """Batches from `start` on, and the end marker. `before`: requests sent first on the same socket."""
    found = []
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(config.replay_endpoint)
        for asked in (*before, start.to_bytes(8, "big")):
            await socket.send_multipart([b"", asked])
        async with asyncio.timeout(120):
            while not found or found[-1][0] != END_OF_REPLAY:
                _, seq, payload = await socket.recv_multipart()
                found.append((seq, payload))
    return [(int.from_bytes(seq, "big"), payload) for seq, payload in found[:-1]]


def engine_config(folder, config, **fields):
    return EngineConfig(
        model=str(folder), load_format="dummy", max_model_len=256, num_gpu_blocks_override=12, kv_events_config=config,
        **fields,
    )  # fmt: skip


async def complete(served, prompt, **fields):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    assert (await served.http.post("/v1/completions", json=body)).status_code == 200


def hashes_of(llm, prompt, salt=""):
    root = scoped_root(llm.ready_info.hash_root, "", salt)
    return [numbers(short_hash(h))[0] for h in block_hashes(root, text_ids(prompt), SIZE)]


def holds(number):
    return lambda event: event[0] == "BlockStored" and number in event[1]


@pytest.mark.parametrize("kv_stream", [True, False])
async def test_stored_and_removed_blocks_are_published_with_tokens(folder, config, subscriber, kv_stream):
    async with (
        zmq_events(config) as events,
        running(engine_config(folder, config, kv_stream=kv_stream)) as llm,
        serving(llm) as served,
    ):
        events.attach(llm)
        await subscriber.joined(events)
        first, second, third = hashes_of(llm, 3 * TEXT)
        await complete(served, 2 * TEXT)
        (stored,) = await subscriber.until(holds(second))
        assert stored == ["BlockStored", [first, second], None, text_ids(2 * TEXT), SIZE, None, "GPU", None, None]
        await complete(served, 3 * TEXT)
        assert await subscriber.until(holds(third)) == [
            ["BlockStored", [third], second, text_ids(TEXT), SIZE, None, "GPU", None, None]
        ]
        await complete(served, 2 * TEXT, cache_salt="own")
        salt = tenant_salt("", "own")
        (salted,) = await subscriber.until(holds(hashes_of(llm, 2 * TEXT, salt)[1]))
        assert salted[8] == [[salt], None]
        await complete(served, "x" * 11 * SIZE)
        removed = await subscriber.until(lambda event: event[0] == "BlockRemoved" and third in event[1])
        assert all(event[2] == "GPU" for event in removed if event[0] == "BlockRemoved")
        assert (await served.http.post("/reset_prefix_cache")).json()["reset"]
        assert (await subscriber.until(lambda event: event[0] == "AllBlocksCleared"))[-1] == ["AllBlocksCleared"]
        assert [seq for seq, _ in subscriber.batches] == list(range(len(subscriber.batches)))


async def test_missed_batches_are_replayed(folder, config, subscriber):
    async with (
        zmq_events(config) as events,
        running(engine_config(folder, config)) as llm,
        serving(llm) as served,
    ):
        events.attach(llm)
        await subscriber.joined(events)
        for number in range(3):
            await complete(served, f"{number}" * SIZE)
            await subscriber.until(holds(hashes_of(llm, f"{number}" * SIZE)[0]))
        assert await replayed(config, 0) == subscriber.batches
        assert await replayed(config, 2) == subscriber.batches[2:]
        assert await replayed(config, 99) == []


async def test_an_invalid_replay_request_is_ignored(config, caplog):
    async with zmq_events(config):
        assert await replayed(config, 0, b"soon") == []
    assert "has 4 bytes" in caplog.text


async def test_the_replay_buffer_is_bounded(config):
    async with zmq_events(replace(config, buffer_steps=2)) as events:
        for number in range(5):
            events.publish(KVChange(removed=run_together([number])), SIZE, {})
        assert [seq for seq, _ in await replayed(config, 0)] == [3, 4]


async def test_extra_keys_are_those_of_vllm(config):
    """The adapter of all blocks, an image of both, and the salt of a prompt's first block alone."""
    blocks = [
        StoredBlock(b"1" * 8, None, [5], "salt", "a hash", [(b"\xab", 0)]),
        StoredBlock(b"2" * 8, b"1" * 8, [5], "salt", "a hash", [(b"\xab", -1)]),
        StoredBlock(b"3" * 8, b"1" * 8, [6]),
        StoredBlock(b"4" * 8, b"1" * 8, [6], "", "unloaded"),
    ]
    async with zmq_events(config) as events:
        events.publish(KVChange(stored=b"".join(b.hash for b in blocks), blocks=blocks), 1, {"a hash": "support"})
        ((_, payload),) = await replayed(config, 0)
    assert [event[7:] for event in msgspec.msgpack.decode(payload)[1]] == [
        ["support", [["support", ["ab", 0], "salt"], ["support", ["ab", -1]]]],
        [None, None],
        ["unloaded", [["unloaded"]]],
    ]


async def test_an_endpoint_in_use_fails_the_start(config):
    async with zmq_events(KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://127.0.0.1:*")):
        pass
    with pytest.raises(StartupError, match="cannot use the endpoint 'nonsense'"):
        ZmqEvents(KVEventsConfig(enable_kv_cache_events=True, endpoint="nonsense"))
    with pytest.raises(StartupError, match="cannot use the endpoint 'udp"):
        ZmqEvents(KVEventsConfig(enable_kv_cache_events=True, endpoint="ipc://@octavo", replay_endpoint="udp://*:1"))


def events_of(value):
    return resolve_config(kv_events_config=value).kv_events_config


def test_the_flag_accepts_vllms_configuration():
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}
    assert events_of(json.dumps(given)) == events_of(given) == KVEventsConfig(**given)
    assert events_of('{"publisher": "null", "enable_kv_cache_events": true}') is None
    assert events_of("{}") is None
    for wrong, reason in (
        *(
            ("[", "JSON object"),
            ("[1]", "JSON object"),
            ("3", "JSON object"),
            ('{"endpint": "x"}', "no field 'endpint'"),
        ),
        *(
            ('{"publisher": "kafka"}', "one of zmq, null"),
            ('{"hwm": -1}', "at least 0"),
            ('{"topic": 3}', "text, got 3"),
        ),
    ):
        with pytest.raises(StartupError, match=f"^kv_events_config.*{reason}"):
            events_of(wrong)


def test_offline_use_with_kv_events_is_refused(folder, config):
    with pytest.raises(StartupError, match="only `octavo serve`"):
        LLM(str(folder), loader=LOADER, load_format="dummy", kv_events_config=config)
