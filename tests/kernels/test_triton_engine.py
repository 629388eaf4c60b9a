"""The whole engine with the Triton kernels, in the interpreter, gives the tokens of the CPU's kernels."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from octavo_engine import LLM, SamplingParams
from octavo_testing.tiny_models import make_tiny
from octavo_testing.triton_device import triton_kernels

PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (25, 16, 3)]


def generate(folder: Path, attention: AbstractContextManager[None]) -> list[list[int]]:
    with attention:
        llm = LLM(str(folder), dtype="float32", max_num_batched_tokens=20, max_num_seqs=4, num_gpu_blocks_override=16)
        params = [
            SamplingParams(temperature=0, max_tokens=4),
            SamplingParams(temperature=0.8, seed=3, max_tokens=4),
            SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=1, max_tokens=4),
        ]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.shutdown()
    return [output.outputs[0].token_ids for output in outputs]


def test_an_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = make_tiny("gemma2", tmp_path)
    assert generate(folder, triton_kernels()) == generate(folder, nullcontext())
