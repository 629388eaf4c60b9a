"""Logs load and throughput every ten seconds, as long as the engine takes steps."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from octavo_engine.wire.records import EngineStats

INTERVAL_S = 10.0

logger = logging.getLogger("octavo")


async def log_stats(stats: Callable[[], EngineStats], interval_s: float = INTERVAL_S) -> None:
    previous = replace(stats())
    while True:
        await asyncio.sleep(interval_s)
        latest = replace(stats())
        if latest.steps != previous.steps:
            logger.info(describe(previous, latest, interval_s))
        previous = latest


def describe(previous: EngineStats, latest: EngineStats, interval_s: float) -> str:
    prompt_rate = (latest.prompt_tokens - previous.prompt_tokens) / interval_s
    generation_rate = (latest.generation_tokens - previous.generation_tokens) / interval_s
    queries = latest.prefix_cache_queries - previous.prefix_cache_queries
    hits = latest.prefix_cache_hits - previous.prefix_cache_hits
    return (
        f"prompt {prompt_rate:.1f} tokens/s, generation {generation_rate:.1f} tokens/s, running {latest.running}, "
        f"waiting {latest.waiting}, KV cache {latest.kv_usage:.1%}, prefix hits {hits / queries if queries else 0:.1%}"
    )
