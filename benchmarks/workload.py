"""The workload of all engines, as token ids.

Prompts are random ids, so that no tokenizer is measured and no prefix is in a cache by chance. End-of-sequence is
ignored and decoding is greedy, so that every engine computes the same number of tokens.
"""

import random
from dataclasses import dataclass

FIRST_ID, END_ID = 1000, 40000  # ids in the vocabulary of every model used here, beyond the special ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes in tokens. The time of one stream is its difference to a run of one token, which cancels the prefill."""

    requests: int = 64
    input_tokens: int = 256
    output_tokens: int = 128
    stream_input_tokens: int = 32
    stream_output_tokens: int = 128
    long_input_tokens: int = 1024

    def crowd(self, repetition: int) -> list[list[int]]:
        return [prompt(self.input_tokens, 1000 * repetition + i) for i in range(self.requests)]

    def stream(self, repetition: int) -> list[int]:
        return prompt(self.stream_input_tokens, 500_000 + repetition)

    def long(self, repetition: int) -> list[int]:
        return prompt(self.long_input_tokens, 700_000 + repetition)


def prompt(tokens: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(FIRST_ID, END_ID) for _ in range(tokens)]
