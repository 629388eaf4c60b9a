"""Replicas of one checkpoint with and without `--quantization int8`: no block of one counts as one of the other."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import Quantization
from octavo_engine.wire.hashing import block_hashes, short_hash
from octavo_engine.wire.kv_stream import numbers
from octavo_server.router.fleet.prefix_index import Match
from octavo_testing.fleets import fleet_at, until
from octavo_testing.server import MODEL, Served, serving
from octavo_testing.tiny_models import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
PROMPT = "The quick brown fox jumps over the lazy dog, and then over all the other dogs, too."


@asynccontextmanager
async def replica(folder: Path, quantization: Quantization | None) -> AsyncIterator[Served]:
    config = EngineConfig(
        model=str(folder), dtype="bfloat16", quantization=quantization, num_gpu_blocks_override=40, num_threads=1
    )
    llm = await AsyncLLM.start(config)
    try:
        async with serving(llm) as started:
            yield started
    finally:
        await llm.shutdown()


async def test_blocks_of_exact_and_of_quantised_weights_are_never_the_same(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    async with replica(folder, None) as exact, replica(folder, "int8") as quantised:
        (request,) = (await exact.http.post("/v1/completions/render", json=body)).json()
        for server in (exact, quantised):
            (await server.http.post("/v1/completions", json=body)).raise_for_status()
        async with fleet_at(exact.url, quantised.url) as fleet:
            await until(lambda: len(fleet.routable(MODEL)) == 2)
            replicas = fleet.routable(MODEL)
            index, slots = fleet.index, [each.blocks.slot for each in replicas if each.blocks is not None]
            roots = {each.hello.root for each in replicas if each.hello is not None}
            assert len(slots) == len(roots) == 2
            found = []
            for root in roots:
                hashes = [numbers(short_hash(block))[0] for block in block_hashes(root, request["token_ids"], 16)]
                whole = [Match(len(hashes))]
                await until(lambda hashes=hashes, whole=whole: [*index.match(hashes, slots).values()] == whole)
                found.append(index.match(hashes, slots))
            assert sorted(slot for match in found for slot in match) == sorted(slots)
