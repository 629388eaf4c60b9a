"""Endless trailers, sent after the body without an API key: memory is bounded, and the client is disconnected."""

import pytest
from octavo_testing.raw_http import RawConnection, ask, completion_body, request_bytes

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

MIB = 1024 * 1024
TRAILERS_BYTES = 8 * MIB
MOST_GROWTH_BYTES = 16 * MIB
#: The shortest lines, and one endless line.
UNITS = {"short lines": b"a:\r\n", "long lines": b"a: " + b"b" * 8000 + b"\r\n", "one line": b"a"}


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
async def test_trailers_are_bounded(server, unit):
    assert (await ask(server.port, "warm up")).status == 200
    server.reset_peak()
    before = server.rss_bytes
    piece = unit * (64 * 1024 // len(unit))
    request = request_bytes(completion_body("trailers"), is_chunked=True).removesuffix(b"\r\n")
    async with await RawConnection.open(server.port) as connection:
        await connection.send(request, *[piece] * (TRAILERS_BYTES // len(piece)), pause_s=0)
        await connection.read_to_end()
    assert server.peak_bytes - before < MOST_GROWTH_BYTES
    assert connection.is_closed
    assert (await ask(server.port, "still there")).status == 200
