import struct

import pytest
from octavo_engine.settings.lora import MAX_NAME_BYTES, MAX_NAMES
from octavo_server.kv.frames import (
    Bye,
    FrameError,
    FrameReader,
    Hello,
    Part,
    ReplicaLoad,
    Snapshot,
    Step,
    TenantLoad,
    write,
)

LOAD = ReplicaLoad(running=3, waiting=1, free_blocks=10, total_blocks=64, prefill_backlog_tokens=500, step_ms=12.5)
FRAMES = [
    Hello(version=1, epoch=2**64 - 1, block_size=16, root=b"r" * 32, max_model_len=8192, models=["m"], heartbeat_s=1.0),
    Part(device=b"12345678" * 3, tenants={"": TenantLoad(1, 2, 3, 4)}),
    Snapshot(epoch=7, seq=4, digest=2**63, load=LOAD),
    Step(epoch=7, seq=5, digest=1, load=LOAD, stored=b"abcdefgh", host_removed=b"12345678"),
    Step(epoch=7, seq=6, digest=1, load=LOAD, tenants={"a": TenantLoad(tokens=2**40), "b": TenantLoad()}),
    Bye("slow reader"),
]


def test_frames_split_at_any_byte_are_read():
    data = b"".join(write(frame) for frame in FRAMES)
    for cut in range(len(data) + 1):
        reader = FrameReader()
        assert [*reader.feed(data[:cut]), *reader.feed(data[cut:])] == FRAMES


def test_frames_are_read_from_single_bytes():
    reader = FrameReader()
    data = b"".join(write(frame) for frame in FRAMES)
    assert [frame for byte in data for frame in reader.feed(bytes([byte]))] == FRAMES


def test_unknown_fields_are_ignored():
    body = b"\x83" + b"\xa4type" + b"\xa3bye" + b"\xa6reason" + b"\xa1x" + b"\xa3new" + b"\x01"
    assert [*FrameReader().feed(struct.pack("<I", len(body)) + body)] == [Bye("x")]


def test_later_fields_of_a_tenant_are_ignored():
    step = Step(epoch=1, seq=1, digest=0, load=LOAD, tenants={"a": TenantLoad(1, 2, 3, 4)})
    body = write(step)[4:].replace(b"\x94\x01\x02\x03\x04", b"\x95\x01\x02\x03\x04\x05")
    assert [*FrameReader().feed(struct.pack("<I", len(body)) + body)] == [step]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", 2**31), "a frame of 2147483648 bytes; the limit is 1048576"),
        (struct.pack("<I", 3) + b"\xff\xff\xff", "a frame is invalid"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "the limit is"),
    ],
)
def test_bytes_that_are_no_kv_stream_are_refused(data, message):
    with pytest.raises(FrameError, match=message):
        [*FrameReader().feed(data)]


def test_the_names_and_hashes_of_all_adapters_fit_into_a_frame():
    adapters = {f"{index:0{MAX_NAME_BYTES}}": "f" * 64 for index in range(MAX_NAMES)}
    step = Step(epoch=1, seq=1, digest=0, load=ReplicaLoad(), adapters=adapters)
    (frame,) = FrameReader().feed(write(step))
    assert frame == step
