"""Places in the queue: a request takes those of all its sequences at once."""

import asyncio

from octavo_server.config import QueueLimits
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving


async def test_requests_that_arrive_together_do_not_overfill_the_queue(tmp_path):
    engine = ScriptedClient(write_byte_model(tmp_path))
    async with serving(engine, queue=QueueLimits(max_num_queued_reqs=120)) as served:
        engine.hold_at = 1
        body = {"prompt": ["a"] * 80, "max_tokens": 4}
        sending = {asyncio.create_task(served.http.post("/v1/completions", json=body)) for _ in range(3)}
        refused, running = await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
        while len(running) > 1:
            more, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            refused |= more
        assert [task.result().status_code for task in refused] == [429, 429]
        assert served.server._context.admission.num_seqs == 80
        engine.resumed.set()
        assert [(await task).status_code for task in running] == [200]
        assert served.server._context.admission.num_seqs == 0
