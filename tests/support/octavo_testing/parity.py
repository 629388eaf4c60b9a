"""Compares the logits of a model with those of transformers, for sequences that are split into steps."""

from torch import Tensor

from octavo_testing.paged import PagedDriver
from octavo_testing.tiny_models import LENGTH

BLOCK = 16
WHOLE = ([LENGTH], [LENGTH])
#: Numbers of tokens of two sequences in each step.
FEEDS = {
    "prefill": WHOLE,
    "prefill_one_after_the_other": ([LENGTH, 0], [0, LENGTH]),
    "decode": ([15] + [1] * (LENGTH - 15), [17] + [1] * (LENGTH - 17) + [0] * 2),
    "chunks_at_block_edges": ([16, 15, 1, 1, 16, 17, LENGTH - 66], [1, 16, 31, 16, 1, 6, 1]),
}


def max_distance(driver: PagedDriver, tokens: Tensor, expected: Tensor, chunks: tuple[list[int], list[int]]) -> float:
    """Return max |Δlogit| over all positions of `tokens` [2, LENGTH]; `expected` [2, LENGTH, vocab]."""
    fed, worst = [0, 0], 0.0
    for counts in zip(*chunks, strict=True):
        step = {seq: tokens[seq, fed[seq] : fed[seq] + n].tolist() for seq, n in enumerate(counts) if n}
        for seq, logits in driver.feed(step).items():
            rows = slice(fed[seq], fed[seq] + len(logits))
            worst = max(worst, (logits - expected[seq, rows]).abs().max().item())
        fed = [done + n for done, n in zip(fed, counts, strict=True)]
    assert fed == [LENGTH, LENGTH]
    return worst
