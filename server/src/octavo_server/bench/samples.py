"""`Sample`, one request of a benchmark, and the generated datasets; `datasets` reads others from files.

Names, options and defaults are vLLM's. A generated prompt is a text that the tokenizer encodes to exactly the wanted
number of tokens, so that every server does the same work.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo_engine.settings.declare import Declared, setting

if TYPE_CHECKING:
    from octavo_engine.text.tokenizer import Tokenizer

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomOptions(Declared):
    """Input and output lengths are uniformly random in [len * (1 - range_ratio), len * (1 + range_ratio)]."""

    random_input_len: int = setting(1024, "Input length in tokens.", group="dataset")
    random_output_len: int = setting(128, "Output length in tokens.")
    random_prefix_len: int = setting(0, "Prefix length in tokens.")
    random_range_ratio: float = setting(
        0.0, "Largest deviation of the dataset random's lengths, as a share of the mean length."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRepetitionOptions(Declared):
    prefix_repetition_prefix_len: int = setting(256, "Prefix length in tokens.", group="dataset")
    prefix_repetition_suffix_len: int = setting(256, "Suffix length in tokens.")
    prefix_repetition_num_prefixes: int = setting(10, "Number of different prefixes of the dataset prefix_repetition.")
    prefix_repetition_output_len: int = setting(128, "Output length in tokens.")


class InvalidDataset(ValueError):
    """The dataset's options or file are unusable."""


class PromptMaker:
    """Builds prompts of random tokens, using only tokens that are complete characters."""

    def __init__(self, codec: "Tokenizer", dice: random.Random) -> None:
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


def _is_text(codec: "Tokenizer", token_id: int) -> bool:
    try:
        return bool(codec.token_bytes(token_id).decode())
    except UnicodeDecodeError:
        return False


def random_samples(codec: "Tokenizer", count: int, seed: int, options: RandomOptions) -> list[Sample]:
    ratio, prefix_len = options.random_range_ratio, options.random_prefix_len
    if not 0 <= ratio < 1:
        raise InvalidDataset(f"--random-range-ratio is {ratio}: it must be from 0 to below 1.")
    if prefix_len + math.floor(options.random_input_len * (1 - ratio)) < 1:
        raise InvalidDataset("--random-input-len is too small: a prompt could have no token.")
    dice = random.Random(seed)
    maker = PromptMaker(codec, dice)
    prefix = maker.tokens(prefix_len)
    return [
        maker.sample(
            [*prefix, *maker.tokens(_around(dice, options.random_input_len, ratio, least=0))],
            _around(dice, options.random_output_len, ratio, least=1),
        )
        for _ in range(count)
    ]


def _around(dice: random.Random, mean: int, ratio: float, *, least: int) -> int:
    low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
    return dice.randint(max(low, least), max(high, least))


def prefix_repetition_samples(
    codec: "Tokenizer", count: int, seed: int, options: PrefixRepetitionOptions
) -> list[Sample]:
    """Prompts in random order, each with one of the prefixes."""
    num_prefixes, output_len = options.prefix_repetition_num_prefixes, options.prefix_repetition_output_len
    if not 0 < num_prefixes <= count:
        raise InvalidDataset(
            f"--prefix-repetition-num-prefixes is {num_prefixes}: give 1 to {count}, the number of prompts."
        )
    dice = random.Random(seed)
    maker = PromptMaker(codec, dice)
    prefixes = [maker.tokens(options.prefix_repetition_prefix_len) for _ in range(num_prefixes)]
    suffixes = (maker.tokens(options.prefix_repetition_suffix_len) for _ in range(count))
    samples = [maker.sample([*prefixes[i % len(prefixes)], *suffix], output_len) for i, suffix in enumerate(suffixes)]
    dice.shuffle(samples)
    return samples
