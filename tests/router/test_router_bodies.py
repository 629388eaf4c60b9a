"""Bodies above the router's limit are refused with their size, the limit and the flag."""

import re

import pytest
from octavo_server.config import RequestLimits
from octavo_testing.routing import routing

CHAT = "/v1/chat/completions"
LIMIT = 100_000


@pytest.fixture
async def routed():
    async with routing(limits=RequestLimits(max_request_bytes=LIMIT)) as started:
        yield started


async def test_a_declared_size_beyond_the_limit_is_refused(routed):
    answer = await routed.http.post(CHAT, content=b"x" * (LIMIT + 1))
    assert answer.status_code == 413
    message = answer.json()["error"]["message"]
    assert f"The request body has {LIMIT + 1} bytes; the limit is {LIMIT}: send less" in message
    assert "--max-request-bytes" in message


@pytest.mark.parametrize("part_bytes", [1000, 2 * LIMIT], ids=["in parts", "at once"])
async def test_a_chunked_body_beyond_the_limit_is_refused(routed, part_bytes):
    async def chunks():
        for _ in range(0, 10 * LIMIT, part_bytes):
            yield b" " * part_bytes

    answer = await routed.http.post(CHAT, content=chunks())
    assert answer.status_code == 413
    read = re.search(rf"has at least (\d+) bytes; the limit is {LIMIT}: ", answer.json()["error"]["message"])
    assert LIMIT < int(read[1]) <= 10 * LIMIT
