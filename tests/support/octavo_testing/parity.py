"""Compares the logits of a model with those of transformers, for sequences that are split into steps."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from octavo_testing.paged import PagedDriver
from octavo_testing.tiny_models import LENGTH, VOCAB

BLOCK = 16
WHOLE = ([LENGTH], [LENGTH])
#: Numbers of tokens of two sequences in each step.
FEEDS = {
    "prefill": WHOLE,
    "prefill_one_after_the_other": ([LENGTH, 0], [0, LENGTH]),
    "decode": ([15] + [1] * (LENGTH - 15), [17] + [1] * (LENGTH - 17) + [0] * 2),
    "chunks_at_block_edges": ([16, 15, 1, 1, 16, 17, LENGTH - 66], [1, 16, 31, 16, 1, 6, 1]),
}


def expected_logits(folder: Path) -> tuple[Tensor, Tensor]:
    """Return random tokens [2, LENGTH], and the logits [2, LENGTH, vocab] of transformers for them."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokens = torch.randint(3, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return tokens, model(tokens).logits


def max_distance(driver: PagedDriver, tokens: Tensor, expected: Tensor, chunks: tuple[list[int], list[int]]) -> float:
    """Return max |Δlogit| over all positions of `tokens` [2, LENGTH]; `expected` [2, LENGTH, vocab]."""
    return (all_logits(driver, tokens, chunks) - expected).abs().max().item()


def all_logits(driver: PagedDriver, tokens: Tensor, chunks: tuple[list[int], list[int]]) -> Tensor:
    """Return the logits [2, LENGTH, vocab] of `tokens` [2, LENGTH]."""
    found: tuple[list[Tensor], list[Tensor]] = [], []
    fed = [0, 0]
    for counts in zip(*chunks, strict=True):
        step = {seq: tokens[seq, fed[seq] : fed[seq] + n].tolist() for seq, n in enumerate(counts) if n}
        for seq, logits in driver.feed(step).items():
            found[seq].append(logits)
        fed = [done + n for done, n in zip(fed, counts, strict=True)]
    assert fed == [LENGTH, LENGTH]
    return torch.stack([torch.cat(parts) for parts in found])
