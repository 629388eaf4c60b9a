"""A real engine that starts each decode step before it knows the tokens of the one before gives equal outputs.

The CPU computes them at once, but hands them over only when they are committed: until then the host has no token, and
the next step takes it from the device.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine import LLM, SamplingParams
from octavo_engine.devices.device import CpuDevice
from octavo_engine.devices.transfers import Fetch
from octavo_engine.frontend.outputs import CompletionOutput
from octavo_engine.runner.batch import UNKNOWN, NewestTokens
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.tiny_models import VOCAB, make_tiny
from torch import Tensor

pytestmark = pytest.mark.slow

EOS = 7
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.9, "top_p": 0.9, "seed": 5, "logprobs": 0},
    "several": {"temperature": 1.1, "n": 4, "seed": 6},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3},
    "penalised forks": {"temperature": 1.0, "n": 3, "seed": 9, "frequency_penalty": 0.9, "presence_penalty": -0.7},
    "shaped": {"temperature": 1.0, "seed": 4, "structured_outputs": StructuredOutputs(regex="[a-z ]{3,30}")},
    "biased": {"temperature": 1.0, "seed": 8, "logit_bias": {9: 2.0}, "min_tokens": 4},
}
GROUPS = {
    "plain": ["greedy", "seeded", "several"],
    "edited": ["penalised", "penalised forks", "biased"],
    "mixed": ["greedy", "seeded", "several", "penalised", "shaped", "biased"],
}
PRESSURE: dict[str, dict[str, Any]] = {
    "ample": {"num_gpu_blocks_override": 80},
    "recomputing": {"num_gpu_blocks_override": 12},
    "swapping": {"num_gpu_blocks_override": 12, "swap_space": 0.0005, "preemption_mode": "swap"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def late_fetch(device: CpuDevice) -> Fetch:
    """Copy when the host waits for the result, and have other numbers before, as pinned memory has."""

    def fetch(values: Tensor) -> Any:
        host, kept = torch.full_like(values, 3), values.clone()
        return lambda: host.copy_(kept)

    return fetch


def generate(folder: Path, kinds: list[str], **settings: Any) -> list[CompletionOutput]:
    """Return the outputs of 15 requests of these kinds."""
    drawn = random.Random(3)
    prompts, params = [], []
    for i in range(15):
        fields = KINDS[kinds[i % len(kinds)]]
        prompts.append({"prompt_token_ids": [drawn.randrange(3, VOCAB) for _ in range(drawn.randrange(1, 30))]})
        fields = fields | {"max_tokens": drawn.randrange(1, 20), "stop_token_ids": [EOS, 11, 12, 13, 14]}
        params.append(
            SamplingParams(**{**fields, "min_tokens": min(fields.get("min_tokens", 0), fields["max_tokens"])})
        )
    llm = LLM(str(folder), dtype="float32", max_num_seqs=10, block_size=8, debug_invariants=True, **settings)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.stats
    llm.shutdown()
    assert stats.in_use_blocks == 0
    return [completion for output in outputs for completion in output.outputs]


@pytest.mark.parametrize("pressure", PRESSURE)
@pytest.mark.parametrize("kinds", GROUPS.values(), ids=GROUPS)
def test_outputs_equal_those_of_steps_one_by_one(
    folder: Path, kinds: list[str], pressure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = generate(folder, kinds, **PRESSURE[pressure])
    monkeypatch.setattr(CpuDevice, "fetch", late_fetch)
    unknown: list[int] = []
    fill_in = NewestTokens.fill_in

    def counted(self: NewestTokens, input_ids: Tensor, slots: Tensor) -> Tensor:
        unknown.append(int((input_ids == UNKNOWN).sum()))
        return fill_in(self, input_ids, slots)

    monkeypatch.setattr(NewestTokens, "fill_in", counted)
    got = generate(folder, kinds, async_scheduling=True, **PRESSURE[pressure])
    ends = [[(o.token_ids, o.finish_reason, o.stop_reason) for o in outputs] for outputs in (got, want)]
    assert ends[0] == ends[1]
    assert "shaped" in kinds or sum(unknown) > sum(len(o.token_ids) for o in want) / 2
    for ahead, one_by_one in zip(got, want, strict=True):
        assert ahead.cumulative_logprob == pytest.approx(one_by_one.cumulative_logprob, abs=1e-3)
