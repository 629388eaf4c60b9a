"""LoRA adapters in one step with the base model against transformers and peft: log-probabilities at all positions."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, LoRARequest, RequestOutput, SamplingParams
from octavo_engine.ops.packed_linear import plain_weight
from octavo_engine.runner import lora_terms
from octavo_testing.lora_adapters import TARGETS, PeftOracle, make_adapter
from octavo_testing.tiny_models import VOCAB, make_tiny
from octavo_testing.triton_device import triton_kernels
from torch import Tensor

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
RANKS = (4, 8, 16, 24, 64)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enable_lora": True,
    "max_loras": 10,
    "max_lora_rank": 64,
    "block_size": 4,
    "num_threads": 1,
    "max_logprobs": -1,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 16,
}


@dataclass
class Rig:
    """`adapters`: one for each module, and two for all modules; None stands for the base model."""

    name: str
    folder: Path
    llm: LLM
    oracle: PeftOracle
    adapters: list[Path | None]

    def generate(self, adapters: list[Path | None], prompts: list[list[int]], **fields: Any) -> list[RequestOutput]:
        params = SamplingParams(**{"temperature": 0, "max_tokens": 6, "logprobs": -1, "ignore_eos": True, **fields})
        requests = [None if path is None else LoRARequest("x", 1, str(path)) for path in adapters]
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return self.llm.generate(given, params, use_tqdm=False, lora_request=requests)

    def check(self, adapter: Path | None, output: RequestOutput) -> None:
        """Compare the log-probabilities of all outputs, and of the prompt if they were requested."""
        prompt = output.prompt_token_ids
        for sequence in output.outputs:
            expected = self.oracle.logprobs(adapter, [*prompt, *sequence.token_ids])
            found = [row(at) for at in sequence.logprobs or []]
            assert (torch.stack(found) - expected[len(prompt) - 1 : -1]).abs().max() < TOLERANCE
            for position, at in enumerate(output.prompt_logprobs or []):
                if at is not None:
                    assert (row(at) - expected[position - 1]).abs().max() < TOLERANCE


def row(position: Any) -> Tensor:
    values = torch.empty(VOCAB)
    for token, entry in position.items():
        values[token] = entry.logprob
    return values


@pytest.fixture(scope="module", params=sorted(TARGETS))
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with start_rig(request.param, tmp_path_factory.mktemp("lora")) as started:
        yield started


@contextmanager
def start_rig(name: str, folder: Path) -> Iterator[Rig]:
    adapters: list[Path | None] = [
        make_adapter(name, folder / target, [target], rank=rank, seed=rank)
        for target, rank in zip(TARGETS[name], cycle(RANKS), strict=False)
    ]
    everything, first = list(TARGETS[name]), TARGETS[name][0]
    adapters.append(
        make_adapter(
            *(name, folder / "patterns", everything),
            rank=8,
            seed=90,
            rank_pattern={first: 24},
            alpha_pattern={rf".*\.2\..*{first}": 3},
        )
    )
    adapters.append(make_adapter(name, folder / "rslora", everything, rank=16, seed=91, lora_alpha=2, use_rslora=True))
    llm = LLM(str(make_tiny(name, folder)), num_gpu_blocks_override=400, **SETTINGS)
    yield Rig(name, folder, llm, PeftOracle(name), [*adapters, None])
    llm.shutdown()


def prompts(count: int, *, least: int = 20) -> list[list[int]]:
    drawn = random.Random(7)
    return [[drawn.randrange(3, VOCAB) for _ in range(least + 2 * i)] for i in range(count)]


def test_every_module_and_the_base_model_in_one_step_are_exact(rig: Rig) -> None:
    """Prompts are computed in chunks, as a step has fewer tokens than all of them."""
    outputs = rig.generate(rig.adapters, prompts(len(rig.adapters)), prompt_logprobs=-1)
    for adapter, output in zip(rig.adapters, outputs, strict=True):
        rig.check(adapter, output)


def test_adapters_change_the_log_probabilities(rig: Rig) -> None:
    (prompt,) = prompts(1)
    base = rig.oracle.logprobs(None, prompt)
    for adapter in rig.adapters[:-1]:
        assert (rig.oracle.logprobs(adapter, prompt) - base).abs().max() > 100 * TOLERANCE


def test_cached_prompts_are_exact_and_no_block_is_shared_between_adapters(rig: Rig) -> None:
    (prompt,) = prompts(1, least=30)
    same = [prompt] * len(rig.adapters)
    assert rig.llm.reset_prefix_cache()
    outputs = [rig.generate([adapter], [prompt])[0] for adapter in rig.adapters]
    assert [output.num_cached_tokens for output in outputs] == [0] * len(rig.adapters)
    outputs = rig.generate(rig.adapters, same)
    assert [output.num_cached_tokens for output in outputs] == [28] * len(rig.adapters)
    for adapter, output in zip(rig.adapters, outputs, strict=True):
        rig.check(adapter, output)


def test_sampled_forks_of_an_adapter_are_exact(rig: Rig) -> None:
    adapters = rig.adapters[-3:]
    for adapter, output in zip(adapters, rig.generate(adapters, prompts(3), n=3, temperature=1, seed=5), strict=True):
        assert len(output.outputs) == 3
        rig.check(adapter, output)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_sequences_are_exact(rig: Rig, mode: str) -> None:
    small = LLM(
        str(rig.folder / rig.name), num_gpu_blocks_override=40, swap_space=0.001, preemption_mode=mode, **SETTINGS
    )
    pressed = Rig(rig.name, rig.folder, small, rig.oracle, rig.adapters)
    outputs = pressed.generate(rig.adapters, prompts(len(rig.adapters)), max_tokens=24)
    assert small.stats.preemptions > 0
    small.shutdown()
    for adapter, output in zip(rig.adapters, outputs, strict=True):
        rig.check(adapter, output)


def test_drafts_keep_the_outputs(rig: Rig) -> None:
    loops = [prompt * 2 for prompt in prompts(len(rig.adapters), least=10)]
    plain = rig.generate(rig.adapters, loops, max_tokens=24)
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    drafting = LLM(str(rig.folder / rig.name), num_gpu_blocks_override=400, **SETTINGS, speculative_config=config)
    outputs = Rig(rig.name, rig.folder, drafting, rig.oracle, rig.adapters).generate(rig.adapters, loops, max_tokens=24)
    assert sum(drafting.stats.accepted_draft_tokens) > 0
    drafting.shutdown()
    for adapter, output, expected in zip(rig.adapters, outputs, plain, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        rig.check(adapter, output)


def test_plain_weights_and_the_kernels_of_gpus_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_terms, "pack", lambda weight: plain_weight(weight, None))
    with triton_kernels(), start_rig("llama", tmp_path) as rig:
        adapters = rig.adapters[-3:]
        for adapter, output in zip(adapters, rig.generate(adapters, prompts(3)), strict=True):
            rig.check(adapter, output)
