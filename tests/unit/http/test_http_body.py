"""Reading a request's body from ASGI messages: limits, the budget of all bodies together, and its release."""

import asyncio

import pytest
from octavo_engine.wire.errors import Overloaded, Unavailable
from octavo_server.config import RequestLimits
from octavo_server.http.body import BodyBudget, ClientDisconnected, UploadTimer, read_body
from octavo_server.openai.errors import RequestTimeout, RequestTooLarge, describe
from octavo_testing.clock import Clock

LIMITS = RequestLimits(max_request_bytes=10, request_timeout=5.0)


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

    limits = RequestLimits(request_timeout=0.001)
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

    monkeypatch.setattr(asyncio, "timeout_at", timer)
    assert await read(b"abc") == b"abc"


async def test_a_tenant_keeps_to_its_share_while_another_uses_the_server():
    budget = BodyBudget(40, clock=Clock())
    with budget.reserve("alice") as first, budget.reserve("alice") as second, budget.reserve("bob") as other:
        await read_body(*request(b"0" * 8), LIMITS, first)
        with pytest.raises(Overloaded, match=r"take 8 bytes of memory, and 3 more exceed its share of 10 "):
            await read_body(*request(b"0" * 3), LIMITS, second)
        await read_body(*request(b"0" * 10), LIMITS, other)
    assert budget.num_bytes == 0


async def test_a_tenant_alone_takes_the_whole_budget():
    budget = BodyBudget(20, clock=Clock())
    with budget.reserve("alice") as first, budget.reserve("alice") as second:
        await read_body(*request(b"0" * 10), LIMITS, first)
        await read_body(*request(b"0" * 10), LIMITS, second)
        assert budget.num_bytes == 20


async def test_the_only_body_of_a_tenant_may_exceed_its_share():
    budget = BodyBudget(20, clock=Clock())
    with budget.reserve("bob"), budget.reserve("alice") as reservation:
        assert await read_body(*request(b"0" * 5, b"1" * 5), LIMITS, reservation) == b"0" * 5 + b"1" * 5


async def test_an_answer_keeps_to_its_tenants_share_from_its_first_byte():
    budget = BodyBudget(20, clock=Clock())
    with budget.reserve("bob"), budget.reserve("alice", is_answer=True) as answer:
        answer.add(5)
        with pytest.raises(Overloaded, match=r"share of 5 .* Send the request again later, or stream the answer\."):
            answer.add(1)


class Deadlines:
    """Records to which times a deadline is moved."""

    def __init__(self):
        self.moved_to = []

    def reschedule(self, when):
        self.moved_to.append(when)


async def test_a_window_of_bytes_moves_the_deadline_until_the_request_has_no_time_left(monkeypatch):
    clock, deadlines = Clock(), Deadlines()
    monkeypatch.setattr(asyncio.get_running_loop(), "time", clock)
    timer = UploadTimer(deadlines, 12.0, RequestLimits(min_upload_rate=10))
    timer.record(49)
    clock.now_s += 4.0
    timer.record(1)
    clock.now_s += 5.0
    timer.record(80)
    assert deadlines.moved_to == [5.0, 9.0, 12.0]


async def test_a_rate_of_zero_leaves_the_time_of_the_request():
    deadlines = Deadlines()
    UploadTimer(deadlines, 12.0, RequestLimits(min_upload_rate=0)).record(1)
    assert deadlines.moved_to == []


async def test_a_slow_body_is_ended(monkeypatch):
    async def never():
        await asyncio.Event().wait()

    monkeypatch.setattr("octavo_server.http.body.UPLOAD_WINDOW_S", 0.001)
    scope, receive = request(b"a", b"b")
    messages = [receive, never]
    with (
        BodyBudget(100).reserve() as reservation,
        pytest.raises(RequestTimeout, match=r"less than 65536 bytes a second"),
    ):
        await read_body(scope, lambda: messages.pop(0)(), LIMITS, reservation)
