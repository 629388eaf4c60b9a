"""The whole engine with the Triton kernels, in the interpreter, gives the tokens of the CPU's kernels."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from octavo_engine import LLM, SamplingParams
from octavo_engine.wire.records import ImageSpan
from octavo_testing.decode_pairs import Pair, make_long_tiny
from octavo_testing.tiny_models import make_tiny
from octavo_testing.tiny_vision import make_tiny_vision
from octavo_testing.triton_device import TritonGraphs, triton_kernels

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


def test_a_graph_rotates_tokens_after_an_image_by_their_positions(tmp_path: Path) -> None:
    """Positions differ from places, where keys and values are written: logits equal those of eager steps."""
    folder = make_tiny_vision("qwen2_vl", tmp_path)
    with triton_kernels():
        pair = Pair.open(folder, device=TritonGraphs, dtype="float32", max_num_seqs=2)
        pair.add(0, list(range(5, 30)), images=(ImageSpan(start=6, length=12, digest=b"", grid=(3, 4)),))
        graphs = pair.recorded.device.graphed
        assert graphs is not None
        for _ in range(2):
            pair.decode([0])
            graph = graphs._graphs[TritonGraphs.buckets[0]]
            assert graph.positions.tolist() == [pair.lengths[0] - 1 - 8]
            assert graph.attention.seq_lens.tolist() == [pair.lengths[0]]


def test_graphs_of_prompts_and_drafts_equal_eager_steps(tmp_path: Path) -> None:
    """Kernels find the sequences of a step on the device, and leave tokens of padding alone."""
    folder = make_long_tiny("qwen3", tmp_path, max_model_len=90)
    with triton_kernels():
        Pair.open(folder, device=TritonGraphs, dtype="float32", max_num_seqs=3).mix_randomly(3, seed=2, most=3)


def test_an_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    folder = make_tiny("gemma2", tmp_path)
    assert generate(folder, triton_kernels()) == generate(folder, nullcontext())
