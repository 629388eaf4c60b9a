"""`Lifecycle` on the event loop that servers run on."""

import asyncio

import pytest
import uvloop
from octavo_engine.wire.errors import Unavailable
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import Lifecycle


def test_a_drain_without_time_has_none_left():
    async def drain():
        lifecycle = Lifecycle(InFlight(), timeout_s=0.0)
        lifecycle.drain(for_good=True)
        return lifecycle.remaining_s

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(drain()) == 0.0


async def no_body():
    return {"type": "http.request", "body": b"", "more_body": False}


async def test_a_stopping_server_may_accept_requests_for_some_time():
    lifecycle = Lifecycle(InFlight(), timeout_s=600.0)
    lifecycle.drain(for_good=True, accepts_for_s=600.0)
    assert lifecycle.state == "stopping"
    await lifecycle.check_accepting(no_body)
    lifecycle.drain(for_good=True)
    with pytest.raises(Unavailable):
        await lifecycle.check_accepting(no_body)
    lifecycle.end_now()
