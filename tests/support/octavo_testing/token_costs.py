"""`python -m octavo_testing.token_costs`: what a token of each body of `combined_bodies` costs, as JSON.

This runs in a process of its own, without the shape checks of the tests, which would cost more than the engine. Engine
and server share a thread, and the client has another one, so the thread's CPU time is that of core and server. The
difference of two requests, which differ in the number of their tokens, is free of what a request costs once. Other
programs on the machine change CPU time little, and the best of some runs counts.
"""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from octavo_server.output_parsing.tool_use import ToolSettings

from octavo_testing.costly_fields import CHAT, LETTER, LETTER_ID, combined_bodies
from octavo_testing.inline_engine import InlineClient, write_large_vocabulary
from octavo_testing.server import Served, serving

FEW, MANY = 10, 110
MAX_RATIO = 3.0
RUNS = 6
#: Context and blocks of the engine.
ENGINE = {"dtype": "float32", "num_threads": 1, "max_model_len": 4096, "num_gpu_blocks_override": 4096}


def read_stream(url: str, body: Mapping[str, Any]) -> None:
    with httpx.stream("POST", url, json=body, timeout=600) as answer:
        answer.read()
        assert answer.status_code == 200, answer.text


async def cost_s(served: Served, path: str, fields: Mapping[str, Any]) -> float:
    """CPU seconds of core and server for each token of a request, of all its sequences together."""
    prompt = {"messages": [{"role": "user", "content": LETTER}]} if path == CHAT else {"prompt": LETTER}
    body = {**prompt, "logit_bias": {str(LETTER_ID): 100}, "ignore_eos": True, "stream": True, **fields}
    took_s = []
    for num_tokens in (FEW, FEW, MANY):  # the first request may fill caches
        lengths = dict.fromkeys(("max_tokens", "min_tokens") if "min_tokens" in body else ("max_tokens",), num_tokens)
        began_s = time.thread_time()
        await asyncio.to_thread(read_stream, served.url + path, {**body, **lengths})
        took_s.append(time.thread_time() - began_s)
    return (took_s[2] - took_s[1]) / (MANY - FEW) / fields.get("n", 1)


async def measure(folder: Path) -> dict[str, tuple[float, float]]:
    """Name of a body -> what its token costs, and one of a plain request with as many sequences, in seconds."""
    found, plain = {}, dict[tuple[str, int], float]()
    client = InlineClient(write_large_vocabulary(folder), **ENGINE)
    async with serving(client, tools=ToolSettings(tool_call_parser="hermes", enable_auto_tool_choice=True)) as served:
        for name, (path, fields) in combined_bodies().items():
            like = path, fields.get("n", 1)
            cost = float("inf")
            if like not in plain:
                await cost_s(served, path, {"n": like[1]})  # the first steps of an engine take longer
            for run in range(RUNS):
                if run or like not in plain:
                    plain[like] = min(plain.get(like, cost), await cost_s(served, path, {"n": like[1]}))
                cost = min(cost, await cost_s(served, path, fields))
                if cost <= MAX_RATIO * plain[like]:
                    break
            found[name] = cost, plain[like]
            print(f"{name}: {1e3 * cost:.2f} ms, plain {1e3 * plain[like]:.2f} ms", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(json.dumps(asyncio.run(measure(Path(temporary)))))
