"""KV blocks for a third of the load: every request finishes with the same tokens as without pressure.

Eviction goes through its three stages: blocks are swapped to host memory, the host tier drops its least recently used
blocks, and dropped blocks are computed again. The engine's counters must show each stage.
"""

import random
from pathlib import Path

import pytest
from octavo_engine import LLM, SamplingParams
from octavo_engine.wire.records import EngineStats
from octavo_testing.tiny_models import VOCAB, make_tiny

pytestmark = pytest.mark.slow

NUM_REQUESTS = 200
RUNNING = 48
BLOCK = 16
LENGTHS = range(20, 49)
OUTPUT = 24
PEAK_BLOCKS = RUNNING * -(-(max(LENGTHS) + OUTPUT) // BLOCK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def serve(folder: Path, **arguments: object) -> tuple[list[list[int]], EngineStats]:
    """Run the requests; return the tokens of each, and the final counters."""
    drawn = random.Random(1)
    prompts = [
        {"prompt_token_ids": [drawn.randrange(3, VOCAB) for _ in range(drawn.choice(LENGTHS))]}
        for _ in range(NUM_REQUESTS)
    ]
    llm = LLM(str(folder), dtype="float32", max_num_seqs=RUNNING, debug_invariants=True, **arguments)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True), use_tqdm=False)
    stats = llm.stats
    llm.shutdown()
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * NUM_REQUESTS
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    return [output.outputs[0].token_ids for output in outputs], stats


def test_a_third_of_the_memory_gives_the_same_tokens(folder: Path) -> None:
    expected, roomy = serve(folder, num_gpu_blocks_override=4 * PEAK_BLOCKS)
    assert roomy.preemptions == 0

    tokens, stats = serve(folder, num_gpu_blocks_override=PEAK_BLOCKS // 3, swap_space=0.0002, preemption_mode="swap")

    assert stats.preemptions_swap > 0
    assert stats.swapped_out_blocks > 0
    assert stats.swapped_in_blocks > 0
    assert stats.dropped_blocks > 0
    assert stats.recomputed_tokens > 0
    assert tokens == expected
