"""A replica's stream with every fault of a network, a proxy or a replica."""

import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.kv_stream import KVChange, KVSet, roll, run_together
from octavo_engine.wire.records import EngineStats
from octavo_server.kv.frames import Bye, FrameReader, Hello, Part, ReplicaLoad, Snapshot, Step, write
from octavo_server.kv.publisher import KVPublisher
from octavo_server.router.fleet.block_mirror import BlockMirror, StreamBroken
from octavo_server.router.fleet.prefix_index import Match, PrefixIndex
from octavo_testing.scripted import ready_info

HELLO = Hello(version=1, epoch=7, block_size=16, root=b"r" * 32, max_model_len=512, models=["m"], heartbeat_s=1.0)


def step(seq, digest, **change):
    packed = {name: run_together(hashes) for name, hashes in change.items()}
    return Step(epoch=7, seq=seq, digest=digest, load=ReplicaLoad(running=seq), **packed)


def snapshot(device=(1, 2), seq=4):
    part = Part(device=run_together(device))
    return [HELLO, part, Snapshot(epoch=7, seq=seq, digest=roll(0, "device", device), load=ReplicaLoad())]


STEPS = [step(5, 1 ^ 2 ^ 4, stored=[4]), step(6, 1 ^ 4, removed=[2]), step(6, 1 ^ 4), step(7, 1 ^ 4 ^ 8, stored=[8])]


@pytest.fixture
def index():
    return PrefixIndex(max_entries=1000)


def read(index, frames):
    replica = BlockMirror(index)
    feed(replica, frames)
    return replica


def feed(replica, frames):
    for frame in frames:
        replica.feed(frame)


def test_a_mirror_is_exact_after_the_snapshot(index):
    replica = read(index, snapshot()[:2])
    assert replica.state == "loading"
    replica.feed(snapshot()[2])
    assert (replica.state, replica.num_blocks) == ("exact", 2)
    for frame in STEPS:
        replica.feed(frame)
    assert (replica.state, replica.num_blocks, replica.load.running) == ("exact", 3, 7)
    assert index.match([1, 4, 8, 2], [replica.slot]) == {replica.slot: Match(3)}


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        pytest.param(STEPS[1:], "frame 6 arrived after frame 4", id="lost"),
        pytest.param([STEPS[0], STEPS[1], STEPS[0]], "frame 5 arrived after frame 6", id="repeated, later"),
        pytest.param([STEPS[1], STEPS[0]], "frame 6 arrived after frame 4", id="reordered"),
        pytest.param([step(5, 99, stored=[4])], "the digest is 0000000000000007, not 0000000000000063", id="lie"),
        pytest.param([step(4, 0)], "the digest", id="heartbeat that disagrees"),
        pytest.param([step(5, 3, stored=[1])], "the digest", id="stored what it has"),
        pytest.param(
            [Step(epoch=8, seq=5, digest=3, load=ReplicaLoad())], "another epoch", id="restart behind a proxy"
        ),
        pytest.param([HELLO], "second hello", id="hello again"),
        pytest.param([Part(device=b"")], "Part frame arrived in the state exact", id="part after the snapshot"),
        pytest.param([Bye("slow reader")], "the replica ended its KV stream: slow reader", id="bye"),
        pytest.param([Step(epoch=7, seq=5, digest=3, load=ReplicaLoad(), stored=b"123")], "3 bytes", id="half a hash"),
        pytest.param(
            [Step(epoch=7, seq=5, digest=3, load=ReplicaLoad(), coming=b"123")], "3 bytes", id="half a coming one"
        ),
    ],
)
def test_a_fault_breaks_the_mirror_with_a_reason(index, frames, reason):
    replica = read(index, snapshot())
    with pytest.raises(StreamBroken, match=reason):
        feed(replica, frames)
    assert replica.state == "broken"
    assert index.acquire_slot() != replica.slot
    while index.sweep(10):
        pass
    assert len(index) == 0


def test_coming_blocks_appear_once_and_are_not_stored(index):
    replica = read(index, [*snapshot(), step(5, 1 ^ 2, coming=[7, 8])])
    assert (replica.state, replica.coming, replica.num_blocks) == ("exact", (7, 8), 2)
    assert index.match([7], [replica.slot]) == {}
    replica.feed(step(5, 1 ^ 2, coming=[7, 8]))
    assert replica.coming == ()


def test_an_immediately_repeated_step_changes_nothing(index):
    """It equals a heartbeat and repeats known changes."""
    replica = read(index, [*snapshot(), STEPS[0], STEPS[0]])
    assert (replica.state, replica.num_blocks) == ("exact", 3)


@pytest.mark.parametrize("frames", [STEPS[:1], snapshot()[1:]])
def test_a_stream_must_begin_with_its_hello(index, frames):
    with pytest.raises(StreamBroken, match="before the hello"):
        read(index, frames)


def test_a_later_version_breaks_the_mirror(index):
    other = Hello(version=2, epoch=1, block_size=16, root=b"", max_model_len=1, models=[], heartbeat_s=1.0)
    with pytest.raises(StreamBroken, match="version 2"):
        read(index, [other])


def test_a_snapshot_with_a_missing_part_breaks_the_mirror(index):
    frames = snapshot(range(1, 99))
    with pytest.raises(StreamBroken, match="the digest"):
        read(index, [frames[0], frames[2]])


def test_a_second_release_does_nothing(index):
    replica = read(index, snapshot())
    replica.release()
    replica.release()
    index.sweep(100)
    assert {index.acquire_slot(), index.acquire_slot()} == {0, 1}


async def test_a_mirror_follows_the_bytes_of_a_publisher(index):
    publisher = KVPublisher(ready_info(EngineConfig()), ("m",))
    published = KVSet()

    def publish(**change):
        packed = KVChange(**{name: run_together(hashes) for name, hashes in change.items()})
        published.apply(packed)
        packed.digest = published.digest
        publisher.publish(packed, EngineStats())

    publish(stored=range(1, 50), host_stored=[70, 71])
    frames, reader = publisher.frames(), FrameReader()
    replica = BlockMirror(index)
    while replica.state == "loading":
        for frame in reader.feed(await anext(frames)):
            replica.feed(frame)
    publish(stored=[100], removed=range(1, 40), host_removed=[70])
    for frame in reader.feed(await anext(frames)):
        replica.feed(frame)
    publisher.close("over")
    last = [frame async for data in frames for frame in reader.feed(data)]
    with pytest.raises(StreamBroken, match="over"):
        feed(replica, last)
    assert published.device == {*range(40, 50), 100}
    assert replica.num_blocks == 11


def test_frames_survive_encoding():
    frames = [*snapshot(), *STEPS]
    assert [*FrameReader().feed(b"".join(write(frame) for frame in frames))] == frames
