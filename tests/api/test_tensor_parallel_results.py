"""A fault in one result at two ranks: its request gets 500, the others of its steps 200, and the ranks stay in step."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import PoolerConfig
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.embedders import make_embedder
from octavo_testing.faulty_results import FAULTY_LENGTH, FAULTY_TOKEN, LOADER
from octavo_testing.server import MODEL, serving

pytestmark = pytest.mark.slow
LENGTHS = [12, 40, FAULTY_LENGTH, 5, 33, 16, 64, 1]


@pytest.mark.parametrize("kind", ["LAST", "CLS", "MEAN", None], ids=str)
async def test_a_fault_in_one_result_ends_its_request_only(tmp_path: Path, kind: Any) -> None:
    path, bodies = "/v1/embeddings", [{"input": [3 + i for i in range(length)]} for length in LENGTHS]
    settings: dict[str, Any] = {"runner": "pooling", "pooler_config": PoolerConfig(pooling_type=kind)}
    if kind is None:
        path, settings = "/v1/completions", {}
        bodies = [{"prompt": body["input"], "max_tokens": 5, "temperature": 0} for body in bodies]
        bodies[2]["logit_bias"] = {str(FAULTY_TOKEN): 1.0}
    config = EngineConfig(
        model=str(make_embedder("qwen3", tmp_path)),
        tensor_parallel_size=2,
        num_threads=2,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        num_gpu_blocks_override=64,
        max_model_len=128,
        **settings,
    )
    with scripted_environment():
        async with running(config, LOADER) as llm, serving(llm) as server:
            for _ in range(2):
                posts = [server.http.post(path, json={"model": MODEL, **body}) for body in bodies]
                codes = [answer.status_code for answer in await asyncio.gather(*posts)]
                assert codes == [500 if i == 2 else 200 for i in range(8)]
            assert not llm.is_dead
