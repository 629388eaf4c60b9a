"""The first of two hosts, as a process that streams, or waits, until its engine has ended, and prints when it did so.

`python -m octavo_testing.two_hosts_streams ARGUMENTS NUM_STREAMS` prints "running", then JSON with the time and errors.
"""

import asyncio
import json
import sys
import time
from typing import Any

from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.log_format import configure_logging
from octavo_engine.settings.engine_args import resolve_config
from octavo_engine.wire.errors import EngineDead
from octavo_engine.wire.sampling import SamplingParams


async def stream(llm: AsyncLLM, name: str, started: asyncio.Event) -> str:
    """Run one request after the other; return the error that ends them."""
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    try:
        while True:
            async for _ in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, name):
                started.set()
    except EngineDead as error:
        return str(error)


async def main(arguments: dict[str, Any], num_streams: int) -> None:
    llm = await AsyncLLM.start(resolve_config(**arguments))
    started = [asyncio.Event() for _ in range(num_streams)]
    streams = [asyncio.create_task(stream(llm, f"stream-{i}", event)) for i, event in enumerate(started)]
    await asyncio.gather(*(event.wait() for event in started))
    print("running", flush=True)
    errors = await asyncio.gather(*streams)
    while not llm.is_dead:
        await asyncio.sleep(0.02)
    print(json.dumps({"ended_s": time.monotonic(), "errors": errors, "cause": str(llm.dead_error)}), flush=True)
    await llm.shutdown()


if __name__ == "__main__":
    configure_logging("text", process="first")
    asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))
