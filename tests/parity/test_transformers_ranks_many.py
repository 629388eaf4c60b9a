"""Models that transformers runs, on two and four ranks: logits are those of transformers alone, and parts are small."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo_engine.models.model import Model
from octavo_engine.ops.native_quantised import QUANTISED_FORMATS, kernels_expand_blocks
from octavo_engine.ops.rank_group import Group
from octavo_engine.runner.adapters import Adapters
from octavo_engine.sources.model_files import ModelFiles
from octavo_engine.sources.resolve import resolve_model
from octavo_testing.lora_adapters import PeftOracle, make_adapter
from octavo_testing.paged import PagedDriver
from octavo_testing.parallel_llm import TEXTS, answers, started
from octavo_testing.parity import WHOLE, all_logits, expected_logits
from octavo_testing.ranks import load_part, run_ranks
from octavo_testing.tiny_models import FAMILIES, VOCAB, make_tiny
from octavo_testing.transformers_ranks import change_sizes, logits_of_ranks, planned_part
from torch import Tensor, nn

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
HAVE_CLASSES = ("phi3", "mixtral", "qwen3_moe", "olmoe")


@pytest.fixture(scope="module", params=[*FAMILIES, *HAVE_CLASSES])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, Tensor, Tensor]:
    folder = make_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    return resolve_model(str(folder)), *expected_logits(folder)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_logits_of_transformers(case: tuple[ModelFiles, Tensor, Tensor], size: int) -> None:
    files, tokens, expected = case
    found = logits_of_ranks(files, tokens, size)
    assert (found - expected).abs().max() <= TOLERANCE
    assert (found.log_softmax(-1) - expected.log_softmax(-1)).abs().max() <= TOLERANCE


#: Sizes that ranks divide in whole panels.
DIVISIBLE = {"vocab_size": 256, "intermediate_size": 128, "moe_intermediate_size": 128}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_has_its_share_of_the_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change_sizes(monkeypatch, name, DIVISIBLE)
    one = planned_part(name, 0, 1)
    for size in (2, 4):
        kv_heads = one.kv_specs()[0].num_kv_heads
        for rank in range(size):
            part = planned_part(name, rank, size)
            copied = 0 if size <= kv_heads else 0.05  # keys and values of a KV head that several ranks have
            assert divided_bytes(part) <= (1.1 / size + copied) * divided_bytes(one)
            assert part.kv_specs()[0].num_kv_heads == max(1, kv_heads // size)


def divided_bytes(part: Model) -> int:
    """Return a rank's bytes without layers that all ranks have: those that make latents, and transformers' embeddings,
    of which MiniCPM3's scales its outputs."""
    latents = [each for name, each in part.named_modules() if name.endswith(("q_a_proj", "kv_a_proj_with_mqa"))]
    tables = [each.weight.nbytes for each in part.modules() if isinstance(each, nn.Embedding)]
    return part.weights_bytes() - sum(each.weights_bytes() for each in latents) - sum(tables)


QUANTISED = [("glm4", "Q4_1"), ("glm4_moe", "Q4_1"), ("olmo3", "Q8_0")]


@pytest.mark.skipif(not kernels_expand_blocks(torch.bfloat16), reason="the kernels are not available")
@pytest.mark.parametrize(("name", "block_format"), QUANTISED)
def test_quantised_weights_of_ranks_are_those_of_one(
    name: str, block_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial sums are rounded to bf16, which changes logits less than the blocks do."""
    if name == "glm4_moe":
        change_sizes(monkeypatch, name, {"moe_intermediate_size": 64})  # a block of 32 for each rank
    files, tokens = resolve_model(str(make_tiny(name, tmp_path))), torch.arange(3, 75).expand(2, -1)

    def logits(group: Group, **build: Any) -> Tensor:
        return all_logits(PagedDriver(load_part(files, group, impl="transformers", **build)), tokens, WHOLE)

    quantised = {"dtype": torch.bfloat16, "quantise_to": QUANTISED_FORMATS[block_format]}
    one, exact = logits(Group(), **quantised), logits(Group())
    two = run_ranks(2, lambda group: logits(group, **quantised))[0]
    of_blocks, of_ranks = ((one - each).square().mean().sqrt() for each in (exact, two))
    assert 0 < of_ranks < of_blocks


ADAPTED = {
    "glm4": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    "olmo3": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "glm4_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_ranks_are_those_of_peft(name: str, tmp_path: Path) -> None:
    files = resolve_model(str(make_tiny(name, tmp_path)))
    folder = make_adapter(name, tmp_path / "adapter", list(ADAPTED[name]), rank=8, seed=1)
    tokens = torch.randint(3, VOCAB, (2, 72), generator=torch.Generator().manual_seed(5))
    oracle = PeftOracle(name)
    expected = torch.stack([oracle.logprobs(folder, sequence.tolist()) for sequence in tokens])

    def logprobs(group: Group) -> Tensor:
        model = load_part(files, group)
        adapters = Adapters(model, max_rank=8)
        with adapters.applied({adapters.load(str(folder)): slice(None)}):
            return all_logits(PagedDriver(model), tokens, WHOLE).log_softmax(-1)

    for size in (2, 4):
        assert (run_ranks(size, logprobs)[0] - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["olmo3", "glm4_moe", "deepseek_v3"])
def test_processes_answer_as_one(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for size in (1, 2, 4):
        with caplog.at_level(logging.INFO), started(str(make_tiny(name, tmp_path)), size, max_model_len=96) as llm:
            found.append(answers(llm, TEXTS[:4], 24))
    assert found[1] == found[0]
    assert found[2] == found[0]
    lines = [line for line in caplog.messages if "is run by transformers" in line]
    assert ["on each of" in line for line in lines] == [False, True, True]
