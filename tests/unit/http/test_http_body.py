"""Reading a request's body from ASGI messages: limits, the budget of all bodies together, and its release."""

import asyncio

import pytest
from octavo_engine.wire.errors import Unavailable
from octavo_server.config import RequestLimits
from octavo_server.http.body import BodyBudget, ClientDisconnected, read_body
from octavo_server.openai.errors import RequestTimeout, RequestTooLarge, describe

LIMITS = RequestLimits(max_request_bytes=10, request_timeout_s=5.0)


def request(*chunks, length=None, leaves=False):
    messages = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    if leaves:
        messages.append({"type": "http.disconnect"})
    else:
        messages[-1]["more_body"] = False

    async def receive():
        return messages.pop(0)

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    return {"type": "http", "headers": headers}, receive


async def read(*chunks, budget=None, limits=LIMITS, **how):
    with (budget or BodyBudget(100)).reserve() as reservation:
        return await read_body(*request(*chunks, **how), limits, reservation)


@pytest.mark.parametrize("chunks", [[b"0123456789"], [b"01234", b"56789"], [b"01234", b"", b"56789"]])
async def test_a_body_of_exactly_the_limit_is_read(chunks):
    assert await read(*chunks, length=10) == b"0123456789"


@pytest.mark.parametrize(("chunks", "how"), [([b"x"], {"length": 11}), ([b"0" * 11], {}), ([b"0" * 6, b"0" * 5], {})])
async def test_a_body_beyond_the_limit_is_refused(chunks, how):
    with pytest.raises(RequestTooLarge, match=r"11 bytes; the limit is 10: .*--max-request-bytes"):
        await read(*chunks, **how)


async def test_a_body_that_never_ends_is_timed_out():
    async def never():
        await asyncio.Event().wait()

    limits = RequestLimits(request_timeout_s=0.001)
    scope, receive = request(b"a", b"b")
    messages = [receive, never]
    with BodyBudget(100).reserve() as reservation, pytest.raises(RequestTimeout, match=r"0\.001 s"):
        await read_body(scope, lambda: messages.pop(0)(), limits, reservation)


async def test_a_disconnect_within_the_body_raises():
    with pytest.raises(ClientDisconnected):
        await read(b"a", leaves=True)


async def test_all_bodies_together_are_bounded_and_released():
    budget = BodyBudget(15)
    with budget.reserve() as first:
        await read_body(*request(b"0" * 10), LIMITS, first)
        with pytest.raises(Unavailable) as refused:
            await read(b"0" * 3, b"0" * 3, budget=budget)
        assert budget.num_bytes == 10
        assert await read(b"0" * 5, budget=budget) == b"00000"
    assert budget.num_bytes == 0
    error = describe(refused.value)
    assert (error.status, error.headers["Retry-After"]) == (503, "1")
    assert "13 bytes" in error.message
    assert "limit of 15 (--max-body-memory)" in error.message


async def test_a_body_in_one_message_starts_no_timer(monkeypatch):
    def timer(_):
        raise AssertionError("a timer was started")

    monkeypatch.setattr(asyncio, "timeout", timer)
    assert await read(b"abc") == b"abc"
