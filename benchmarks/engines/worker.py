"""The engine's side of the protocol: one JSON command per line on stdin, one JSON answer per line on stdout.

An engine is a `generate` function that returns the number of tokens of each output; only this call is timed. Standard
output is redirected to standard error before the engine is loaded, because libraries that print would break the
protocol. This module uses only the standard library, because it runs in the environments of peers.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], int], list[int]]
Counters = Callable[[], dict[str, float]]


def no_counters() -> dict[str, float]:
    return {}


def serve(load: Callable[[], Generate], counters: Counters = no_counters) -> None:
    """Load the engine, report the load time, then answer commands until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    start = time.perf_counter()
    generate = load()
    _answer(answers, {"load_s": time.perf_counter() - start})
    for line in sys.stdin:
        command = json.loads(line)
        prompts, max_tokens = command["prompts"], command["max_tokens"]
        before = counters()
        start = time.perf_counter()
        tokens = generate(prompts, max_tokens)
        seconds = time.perf_counter() - start
        if tokens != [max_tokens] * len(prompts):
            raise RuntimeError(f"asked for {max_tokens} tokens each, got {tokens}")
        spent = {name: value - before[name] for name, value in counters().items()}
        _answer(answers, {"seconds": seconds, **spent})


def _answer(stream: Any, content: dict[str, float]) -> None:
    stream.write(json.dumps(content) + "\n")
