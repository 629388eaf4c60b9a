"""Builds samples from the dataset flags: chooses the dataset, its options, and the tokenizer that it needs. Files hold
ShareGPT conversations, custom prompts as JSON lines, or BurstGPT's recorded lengths.
"""

import argparse
import csv
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.template import load_chat_template
from octavo_engine.text.tokenizer import Tokenizer, load_tokenizer

from octavo_server.bench.flags import DATASETS, FILE_DATASETS
from octavo_server.bench.samples import (
    InvalidDataset,
    PrefixRepetitionOptions,
    PromptMaker,
    RandomOptions,
    Sample,
    prefix_repetition_samples,
    random_samples,
)
from octavo_server.cli.declared_flags import record_of

_Length = TypeVar("_Length", int, int | None)
#: Limits in tokens, as in vLLM; ShareGPT conversations that are shorter or longer are left out.
_MIN_LEN, _MAX_PROMPT_LEN, _MAX_TOTAL_LEN = 4, 1024, 2048

#: Renders one user message with the chat template.
Template = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class TextTools:
    """Tokenizer and chat template of a model; `template` is None if the model has no chat template."""

    tokenizer: Tokenizer
    template: Template | None


def load_text_tools(model: str) -> TextTools:
    """Load the tokenizer and chat template of a model, downloading no other files. Raises StartupError."""
    files = resolve_model(model, load_format="dummy")
    tokenizer = load_tokenizer(files)
    template = load_chat_template(files, tokenizer, None)

    def render(question: str) -> str:
        assert template is not None
        return template.render([{"role": "user", "content": question}], add_generation_prompt=True)

    return TextTools(tokenizer, None if template is None else render)


def check_dataset(args: argparse.Namespace) -> None:
    """Check the dataset flags before any download. Raises InvalidDataset."""
    name = args.dataset_name
    if name not in DATASETS:
        raise InvalidDataset(
            f"--dataset-name {name} is not supported by this version: use one of {', '.join(DATASETS)}."
        )
    if name in FILE_DATASETS and args.dataset_path is None:
        raise InvalidDataset(f"--dataset-name {name} needs --dataset-path FILE.")
    if name not in FILE_DATASETS and args.dataset_path is not None:
        raise InvalidDataset(
            f"--dataset-name {name} reads no file: leave out --dataset-path, or choose another dataset."
        )


def make_samples(args: argparse.Namespace, text: TextTools, count: int, seed: int, *, uses_chat: bool) -> list[Sample]:
    """Build the samples of the dataset. Raises InvalidDataset. `uses_chat`: the server applies the chat template, so
    the prompts are messages without it."""
    codec = text.tokenizer
    if args.dataset_name == "random":
        options = record_of(
            RandomOptions, args, **_given(random_input_len=args.input_len, random_output_len=args.output_len)
        )
        return random_samples(codec, count, seed, options)
    if args.dataset_name == "prefix_repetition":
        repetition = record_of(PrefixRepetitionOptions, args, **_given(prefix_repetition_output_len=args.output_len))
        return prefix_repetition_samples(codec, count, seed, repetition)
    samples = list(itertools.islice(_from_file(args, text, count, seed, uses_chat=uses_chat), count))
    if not samples:
        raise InvalidDataset(f"{args.dataset_path} has no usable prompt.")
    return samples if args.no_oversample else list(itertools.islice(itertools.cycle(samples), count))


def _from_file(
    args: argparse.Namespace, text: TextTools, count: int, seed: int, *, uses_chat: bool
) -> Iterator[Sample]:
    codec, path = text.tokenizer, Path(args.dataset_path)
    if args.dataset_name == "sharegpt":
        return sharegpt_samples(codec, count, seed, path, _first(args.output_len, args.sharegpt_output_len))
    if args.dataset_name == "burstgpt":
        return burstgpt_samples(codec, seed, path)
    template = None if uses_chat or args.skip_chat_template else text.template
    output_len = _first(args.output_len, args.custom_output_len)
    return custom_samples(codec, seed, path, output_len, template, shuffles=not args.disable_shuffle)


def _given(**values: int | None) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def _first(general: int | None, own: _Length) -> int | _Length:
    return own if general is None else general


def sharegpt_samples(codec: Tokenizer, count: int, seed: int, path: Path, output_len: int | None) -> Iterator[Sample]:
    """The first question of each conversation, in random order; the output length is that of the recorded answer."""
    entries = _json(path)
    if not isinstance(entries, list):
        raise InvalidDataset(f"{path} is not a list of conversations in ShareGPT's format.")
    turns = [turns for entry in entries if isinstance(entry, dict) and (turns := _turns(entry))]
    random.Random(seed).shuffle(turns)
    for question, answer in turns:
        ids = codec.encode(question)
        answer_len = len(codec.encode(answer, add_special_tokens=False)) if output_len is None else output_len
        too_short = len(ids) < _MIN_LEN or (output_len is None and answer_len < _MIN_LEN)
        if not too_short and len(ids) <= _MAX_PROMPT_LEN and len(ids) + answer_len <= _MAX_TOTAL_LEN:
            yield Sample(prompt=question, token_ids=ids, output_len=answer_len)


def _turns(entry: dict[str, Any]) -> tuple[str, str] | None:
    turns = entry.get("conversations") or entry.get("conversation") or []
    values = [turn.get("value", turn.get("content")) for turn in turns[:2] if isinstance(turn, dict)]
    texts = [value for value in values if isinstance(value, str)]
    return (texts[0], texts[1]) if len(texts) == 2 else None


def custom_samples(
    codec: Tokenizer, seed: int, path: Path, output_len: int, template: Template | None, *, shuffles: bool
) -> Iterator[Sample]:
    """Read lines such as {"prompt": "...", "output_tokens": 100}. `output_len` -1: use each line's output_tokens."""
    lines = [line for line in _text(path).splitlines() if line.strip()]
    if shuffles:
        random.Random(seed).shuffle(lines)
    for line in lines:
        entry = _line(path, line)
        num_tokens = output_len if output_len != -1 else entry.get("output_tokens")
        if not isinstance(num_tokens, int):
            raise InvalidDataset(f"{path}: --custom-output-len -1 needs output_tokens in every line.")
        prompt = entry["prompt"] if template is None else template(entry["prompt"])
        yield Sample(prompt=prompt, token_ids=codec.encode(prompt), output_len=num_tokens)


def _line(path: Path, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise InvalidDataset(f'{path}: every line must be a JSON object with "prompt"; this one is not: {line[:80]}')
    return entry


def burstgpt_samples(codec: Tokenizer, seed: int, path: Path) -> Iterator[Sample]:
    """Random texts with the lengths of the GPT-4 requests that did not fail."""
    dice = random.Random(seed)
    maker = PromptMaker(codec, dice)
    rows = list(csv.DictReader(_text(path).splitlines()))
    try:
        lengths = [(int(row["Request tokens"]), int(row["Response tokens"])) for row in rows if row["Model"] == "GPT-4"]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidDataset(
            f"{path} is not a BurstGPT file: it needs the columns Model, Request tokens, Response tokens."
        ) from error
    dice.shuffle(lengths)
    for input_len, output_len in lengths:
        if input_len > 0 and output_len > 0:
            yield maker.sample(maker.tokens(input_len), output_len)


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise InvalidDataset(f"{path} is not JSON: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidDataset(f"--dataset-path {path}: {error.strerror}.") from error
