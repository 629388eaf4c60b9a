"""Bodies of the largest size in every shape that is expensive to parse, and every two fields at their limits: the event
loop stays free, memory bounded."""

import asyncio
import gc
import time
from contextlib import suppress

import msgspec
import pytest
from octavo_testing.health_probe import HealthProbe
from octavo_testing.hostile_bodies import PRODUCTS, SHAPES, hostile_body, product_body
from octavo_testing.raw_http import RawConnection

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

#: The default of `--max-request-bytes`.
LIMIT_BYTES = 4 * 1024 * 1024
SMALL_BYTES = 256 * 1024
MIB = 1024 * 1024
#: A machine that does other work stops each process now and then: the best of so many runs counts, unless one was
#: too long by this factor.
RUNS, HOPELESS = 5, 4
ANSWER_TIMEOUT_S = 60.0
LEAST_STANDSTILL_S = 0.1


def decode_s(body):
    """Seconds that msgspec takes to decode or refuse the body on this machine."""
    best = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter()
        with suppress(msgspec.DecodeError, RecursionError):
            msgspec.json.decode(body)
        best = min(best, time.perf_counter() - started)
    return best


def contention():
    """Wall-clock time of a busy loop over its CPU time: 1 on a quiet machine, 2 where two processes share a core."""
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_s < 0.05:
        pass
    return max((time.perf_counter() - wall_s) / (time.thread_time() - cpu_s), 1.0)


async def standstill_s(server, path, body):
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % path.encode()
    async with HealthProbe(server.port) as probe, await RawConnection.open(server.port) as connection:
        await connection.send(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answers = await connection.read_answers(1, timeout_s=ANSWER_TIMEOUT_S)
        assert answers or connection.is_closed, f"no answer within {ANSWER_TIMEOUT_S:g} s"
    return probe.longest_s


@pytest.mark.parametrize("num_bytes", [SMALL_BYTES, LIMIT_BYTES], ids=["256KiB", "limit"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_no_body_stops_the_event_loop_or_multiplies_its_memory(server, shape, num_bytes):
    path, body = hostile_body(shape, num_bytes)
    assert len(body) <= num_bytes
    await standstill_s(server, *hostile_body(shape, SMALL_BYTES))  # Python keeps the memory of many small objects, once
    await check_bounded(server, path, body)


@pytest.mark.parametrize("is_beyond", [False, True], ids=["within", "beyond"])
@pytest.mark.parametrize("product", PRODUCTS)
async def test_no_product_of_two_fields_stops_the_event_loop_or_multiplies_memory(server, product, is_beyond):
    path, body = product_body(product, is_beyond=is_beyond)
    await standstill_s(server, path, body)
    await check_bounded(server, path, body)


async def check_bounded(server, path, body):
    most_s = max(LEAST_STANDSTILL_S, 3 * decode_s(body))
    gc.collect()
    server.reset_peak()
    before = server.rss_bytes

    longest_s = []
    while len(longest_s) < RUNS and most_s < min(longest_s, default=2 * most_s) < HOPELESS * most_s:
        shared = contention()
        longest_s.append(await standstill_s(server, path, body) / max(shared, contention()))

    assert min(longest_s) <= most_s
    assert server.peak_bytes - before <= 8 * len(body) + 32 * MIB
    deadline_s = time.monotonic() + 10
    while (kept := server.rss_bytes - before) > 2 * len(body) + 16 * MIB and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    assert kept <= 2 * len(body) + 16 * MIB
