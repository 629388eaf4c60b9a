"""Families that transformers' implementation runs: their logits and greedy tokens equal those of transformers alone."""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.weights import fresh_memory
from octavo_engine.weights.loader import iter_weights
from octavo_testing.paged import PagedDriver
from octavo_testing.parity import BLOCK, FEEDS, max_distance
from octavo_testing.tiny_models import FAMILIES, LENGTH, VOCAB, make_tiny
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
MIN_LOGIT_STD = 1.0
HAVE_CLASSES = ("mixtral", "qwen3_moe", "olmoe")


@dataclass(frozen=True)
class Case:
    folder: Path
    reference: PreTrainedModel
    tokens: Tensor  # [2, LENGTH]
    expected: Tensor  # [2, LENGTH, vocab]

    def model(self) -> Model:
        files = resolve_model(str(self.folder))
        model = build_model(
            load_model_config(files), impl="transformers", dtype=torch.float32, device="cpu", max_model_len=LENGTH
        )
        model.load_weights(iter_weights(files))
        model.finish_loading()
        return model


def open_case(name: str, folder: Path) -> Case:
    made = make_tiny(name, folder)
    reference = AutoModelForCausalLM.from_pretrained(made, attn_implementation="eager").eval()
    tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return Case(made, reference, tokens, reference(tokens).logits)


@pytest.fixture(scope="module", params=[*FAMILIES, *HAVE_CLASSES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return open_case(request.param, tmp_path_factory.mktemp("tiny"))


#: Chunks of 1, 7 and 16 tokens of both sequences, beside those of all models.
CHUNKS = {size: ([min(size, LENGTH - at) for at in range(0, LENGTH, size)],) * 2 for size in (1, 7, 16)}


def test_logits_equal_transformers(case: Case) -> None:
    model = case.model()
    for chunks in (*FEEDS.values(), *CHUNKS.values()):
        driver = PagedDriver(model, backend=CpuBackend(model.kv_specs(), BLOCK, torch.float32))
        assert max_distance(driver, case.tokens, case.expected, chunks) <= TOLERANCE


def test_the_reference_logits_vary_enough(case: Case) -> None:
    assert case.expected.std() >= MIN_LOGIT_STD


@pytest.mark.parametrize(("mode", "swap_space"), [("swap", 0.01), ("recompute", 0.0)])
def test_tokens_equal_generate_under_preemption_and_prefix_hits(case: Case, mode: str, swap_space: float) -> None:
    """The second round finds the prompts of the first in the cache, and both rounds have too few blocks. Prompts exceed
    the original length of longrope, where `generate` changes frequencies within a sequence and Octavo does not.
    """
    prompts = [case.tokens[seq, :length].tolist() for seq, length in ((0, 27), (0, 48), (1, 32), (1, 43))]
    llm = LLM(
        str(case.folder),
        model_impl="transformers",
        dtype="float32",
        max_model_len=LENGTH,
        num_gpu_blocks_override=9,
        preemption_mode=mode,
        swap_space=swap_space,
        debug_invariants=True,
    )
    params = [SamplingParams(temperature=0, max_tokens=LENGTH - len(ids), ignore_eos=True) for ids in prompts]
    rounds = [llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False) for _ in range(2)]
    assert llm.stats.preemptions > 0
    assert any(output.num_cached_tokens >= BLOCK for output in rounds[1])
    llm.shutdown()
    for ids, first, second in zip(prompts, *rounds, strict=True):
        assert first.outputs[0].token_ids == second.outputs[0].token_ids == generated(case.reference, ids)


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_length=LENGTH, eos_token_id=[], pad_token_id=0)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "llama_dynamic", "mistral", "qwen3", "gemma2", "gemma3", "phi3_longrope"])
def test_both_implementations_give_equal_tokens(name: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    found = []
    for impl in ("octavo", "transformers"):
        llm = LLM(str(folder), model_impl=impl, dtype="float32", max_model_len=LENGTH, num_gpu_blocks_override=32)
        params = SamplingParams(temperature=0, max_tokens=LENGTH - 20, ignore_eos=True)
        prompts = [{"prompt_token_ids": list(range(start, start + 20))} for start in (10, 60, 120)]
        found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        llm.shutdown()
    assert found[0] == found[1]


def test_a_model_in_training_mode_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers builds a model in this mode, in which Seed-OSS drops values of its residual stream."""
    case = open_case("seed_oss", tmp_path)
    monkeypatch.setattr(PreTrainedModel, "eval", lambda self: self)
    model = case.model()
    driver = PagedDriver(model, backend=CpuBackend(model.kv_specs(), BLOCK, torch.float32))
    assert max_distance(driver, case.tokens, case.expected, FEEDS["prefill"]) > 100 * TOLERANCE


class CountedMemory(mmap.mmap):
    """Memory of a tensor that is read from a file; it lives as long as the tensor."""

    live = peak = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        CountedMemory.live += len(self)
        CountedMemory.peak = max(CountedMemory.peak, CountedMemory.live)

    def __del__(self) -> None:
        CountedMemory.live -= len(self)


@pytest.mark.parametrize("name", ["glm4", "glm4_moe", "granitemoe"])
def test_loading_holds_one_tensor_beside_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest one has all experts of a layer in Granite-MoE's files."""
    case = open_case(name, tmp_path)
    largest = max(tensor.nbytes for tensor in load_file(case.folder / "model.safetensors").values())
    monkeypatch.setattr(fresh_memory, "MIN_BYTES", 1)
    monkeypatch.setattr(mmap, "mmap", CountedMemory)
    monkeypatch.setattr(CountedMemory, "peak", 0)
    model = case.model()
    assert 0 < CountedMemory.peak <= largest + 0.1 * model.weights_bytes()
    assert CountedMemory.live == 0
