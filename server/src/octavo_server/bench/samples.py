"""`Sample`, one request of a benchmark, and the generated datasets; `sample_files` reads datasets from files.

Names, options and defaults are vLLM's. A generated prompt is a text that the tokenizer encodes to exactly the wanted
number of tokens, so that every server does the same work.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_MOST_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request of a benchmark. `token_ids`: the tokens of `prompt`."""

    prompt: str
    token_ids: list[int]
    output_len: int

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids)


class Codec(Protocol):
    """The part of a tokenizer's interface that is needed to generate prompts."""

    vocab_size: int
    special_ids: frozenset[int]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomOptions:
    """Input and output lengths are uniformly random in [len * (1 - range_ratio), len * (1 + range_ratio)]."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRepetitionOptions:
    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128


class InvalidDataset(ValueError):
    """The dataset's options or file are unusable."""


class PromptMaker:
    """Builds prompts of random tokens, using only tokens that are complete characters."""

    def __init__(self, codec: Codec, dice: random.Random) -> None:
        self._codec = codec
        self._dice = dice
        self._tokens = [i for i in range(codec.vocab_size) if i not in codec.special_ids and _is_text(codec, i)]
        if not self._tokens:
            raise InvalidDataset("the tokenizer has no token that consists of complete characters.")

    def tokens(self, count: int) -> list[int]:
        return self._dice.choices(self._tokens, k=count)

    def sample(self, ids: Sequence[int], output_len: int) -> Sample:
        """Make a sample from the text of `ids`. If encoding it merges tokens, random tokens restore the length."""
        target, wanted = len(ids), list(ids)
        for _ in range(_MOST_ROUNDS):
            text = self._codec.decode(wanted)
            token_ids = self._codec.encode(text, add_special_tokens=False)
            if len(token_ids) == target:
                break
            wanted = (
                token_ids[:target] if len(token_ids) > target else [*token_ids, *self.tokens(target - len(token_ids))]
            )
        return Sample(prompt=text, token_ids=token_ids, output_len=output_len)


def _is_text(codec: Codec, token_id: int) -> bool:
    try:
        return bool(codec.token_bytes(token_id).decode())
    except UnicodeDecodeError:
        return False


def random_samples(codec: Codec, count: int, seed: int, options: RandomOptions) -> list[Sample]:
    if not 0 <= options.range_ratio < 1:
        raise InvalidDataset(f"--random-range-ratio is {options.range_ratio}: it must be from 0 to below 1.")
    if options.prefix_len + math.floor(options.input_len * (1 - options.range_ratio)) < 1:
        raise InvalidDataset("--random-input-len is too small: a prompt could have no token.")
    dice = random.Random(seed)
    maker = PromptMaker(codec, dice)
    prefix = maker.tokens(options.prefix_len)
    return [
        maker.sample(
            [*prefix, *maker.tokens(_around(dice, options.input_len, options.range_ratio, least=0))],
            _around(dice, options.output_len, options.range_ratio, least=1),
        )
        for _ in range(count)
    ]


def _around(dice: random.Random, mean: int, ratio: float, *, least: int) -> int:
    low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
    return dice.randint(max(low, least), max(high, least))


def prefix_repetition_samples(codec: Codec, count: int, seed: int, options: PrefixRepetitionOptions) -> list[Sample]:
    """Prompts in random order, each with one of `num_prefixes` prefixes."""
    if not 0 < options.num_prefixes <= count:
        raise InvalidDataset(
            f"--prefix-repetition-num-prefixes is {options.num_prefixes}: give 1 to {count}, the number of prompts."
        )
    dice = random.Random(seed)
    maker = PromptMaker(codec, dice)
    prefixes = [maker.tokens(options.prefix_len) for _ in range(options.num_prefixes)]
    samples = [
        maker.sample([*prefixes[i % len(prefixes)], *maker.tokens(options.suffix_len)], options.output_len)
        for i in range(count)
    ]
    dice.shuffle(samples)
    return samples
