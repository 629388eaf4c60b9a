"""`Lifecycle` on the event loop that servers run on."""

import asyncio

import uvloop
from octavo_server.http.in_flight import InFlight
from octavo_server.http.lifecycle import Lifecycle


def test_a_drain_without_time_has_none_left():
    async def drain():
        lifecycle = Lifecycle(InFlight(), timeout_s=0.0)
        lifecycle.drain(for_good=True)
        return lifecycle.remaining_s

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(drain()) == 0.0
