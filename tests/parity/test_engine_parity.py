"""The whole engine against transformers in fp32, for each architecture, in every way of running a sequence.

`LLM` gives the log-probabilities of the whole vocabulary at each sampled position; the reference is one forward pass
of transformers over prompt and output. Each test asserts by the engine's counters that its case has occurred.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import octavo_engine.loop.proposers
import pytest
import torch
from octavo_engine import LLM, RequestOutput, SamplingParams
from octavo_testing.tiny_models import LENGTH, TINY, VOCAB, make_tiny
from octavo_testing.triton_device import triton_kernels
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
BLOCK = 16
NUM_BLOCKS = 64
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
LENGTHS = (21, 32, 43, 48)  # two of them end on a block's edge


@dataclass(frozen=True)
class Case:
    name: str
    folder: Path
    reference: PreTrainedModel

    @contextmanager
    def llm(self, **arguments: Any) -> Iterator[LLM]:
        common: dict[str, Any] = {"dtype": "float32", "max_logprobs": -1, "debug_invariants": True}
        common |= {"max_model_len": TINY[self.name].max_model_len, "num_gpu_blocks_override": NUM_BLOCKS}
        llm = LLM(str(self.folder), **(common | arguments))
        yield llm
        llm.shutdown()

    def distance(self, outputs: list[RequestOutput]) -> float:
        """Return max |Δ log-probability| over the vocabulary and all sampled positions."""
        worst = 0.0
        for request in outputs:
            for output in request.outputs:
                tokens = [*request.prompt_token_ids, *output.token_ids]
                with torch.inference_mode():
                    logits = self.reference(torch.tensor([tokens])).logits[0]
                expected = logits.log_softmax(-1)[len(request.prompt_token_ids) - 1 : -1]
                ours = torch.tensor([[row[token].logprob for token in range(VOCAB)] for row in output.logprobs])
                worst = max(worst, (ours - expected).abs().max().item())
        return worst


#: Also with the attention kernels of GPUs, in Triton's interpreter.
TRITON = tuple(f"{name}, Triton" for name in ("llama", "qwen3", "gemma2"))


@pytest.fixture(scope="module", params=(*TINY, *TRITON))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, _, kernels = request.param.partition(", ")
    folder = make_tiny(name, tmp_path_factory.mktemp("tiny"))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with triton_kernels() if kernels else nullcontext():
        yield Case(name, folder, model)


def prompts(*lengths: int, seed: int = 3) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [{"prompt_token_ids": ids} for ids in drawn]


def sampling(prompt: dict[str, list[int]], **fields: Any) -> SamplingParams:
    """Sample up to `LENGTH` tokens, which exceeds the windows and the original RoPE lengths."""
    room = LENGTH - len(prompt["prompt_token_ids"])
    return SamplingParams(**({"temperature": 0, "max_tokens": room, "ignore_eos": True, "logprobs": -1} | fields))


def generate(llm: LLM, batch: list[dict[str, list[int]]], **fields: Any) -> list[RequestOutput]:
    return llm.generate(batch, [sampling(prompt, **fields) for prompt in batch], use_tqdm=False)


def test_a_batch_equals_transformers(case: Case) -> None:
    with case.llm() as llm:
        outputs = generate(llm, prompts(*LENGTHS))
        assert llm.stats.preemptions == 0
    assert case.distance(outputs) <= TOLERANCE


def test_chunked_prompts_equal_transformers(case: Case) -> None:
    with case.llm(max_num_batched_tokens=10, max_num_seqs=8) as llm:
        outputs = generate(llm, prompts(*LENGTHS))
        assert llm.stats.steps > LENGTH - min(LENGTHS), "even the shortest prompt took several steps"
    assert case.distance(outputs) <= TOLERANCE


def test_cached_prompts_equal_transformers(case: Case) -> None:
    """Prompts that end on a block's edge are cached completely: their last token is written to a copy of its block."""
    with case.llm() as llm:
        generate(llm, prompts(*LENGTHS), max_tokens=1)
        outputs = generate(llm, prompts(*LENGTHS))
        assert [output.num_cached_tokens for output in outputs] == [16, 31, 32, 47]
        assert llm.stats.cow_copies >= 2
    assert case.distance(outputs) <= TOLERANCE


@pytest.fixture
def always_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts be made also where the measured times say that they do not pay."""
    for module in (octavo_engine.loop.proposers, octavo_engine.loop.proposers):
        monkeypatch.setattr(module, "least_share", lambda num_seqs, costs: 0.0)


@pytest.mark.usefixtures("always_draft")
def test_outputs_with_drafts_equal_transformers(case: Case) -> None:
    """The prompts repeat themselves, and a model without training soon does, too, so drafts are found and accepted."""
    repeated = [{"prompt_token_ids": prompt["prompt_token_ids"][:7] * 3} for prompt in prompts(*LENGTHS)]
    with case.llm(speculative_config=DRAFTS) as llm:
        outputs = generate(llm, repeated)
        stats = llm.stats
        assert sum(stats.accepted_draft_tokens) > 0
        assert stats.drafts > 0
    assert case.distance(outputs) <= TOLERANCE


@pytest.mark.usefixtures("always_draft")
def test_outputs_with_a_draft_model_equal_transformers(case: Case) -> None:
    """The model is its own draft model. Its drafts are right, but for ties: one row and several differ in last bits."""
    drafts = {"model": str(case.folder), "num_speculative_tokens": 4}
    with case.llm(speculative_config=drafts) as llm:
        outputs = generate(llm, prompts(*LENGTHS))
        assert sum(llm.stats.accepted_draft_tokens) >= 0.9 * llm.stats.draft_tokens > 0
    assert case.distance(outputs) <= TOLERANCE


def test_forked_outputs_equal_transformers(case: Case) -> None:
    with case.llm() as llm:
        outputs = generate(llm, prompts(*LENGTHS), n=3, temperature=2.0, seed=7)
        assert llm.stats.cow_copies >= 2 * 2, "two prompts end within a block, which two of three children copy"
    assert all(len({tuple(o.token_ids) for o in output.outputs}) > 1 for output in outputs)
    assert case.distance(outputs) <= TOLERANCE


@pytest.mark.parametrize(("mode", "swap_space"), [("swap", 0.01), ("recompute", 0.0)])
def test_preempted_sequences_equal_transformers(case: Case, mode: str, swap_space: float) -> None:
    with case.llm(num_gpu_blocks_override=9, preemption_mode=mode, swap_space=swap_space) as llm:
        outputs = generate(llm, prompts(*LENGTHS))
        stats = llm.stats
        assert stats.preemptions_swap if mode == "swap" else stats.preemptions_recompute
        assert (stats.swapped_out_blocks > 0) == (stats.swapped_in_blocks > 0) == (mode == "swap")
        assert stats.recomputed_tokens or mode == "swap"
    assert case.distance(outputs) <= TOLERANCE
