"""Builds samples from the dataset flags: chooses the dataset, its options, and the tokenizer that it needs."""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.template import load_chat_template
from octavo_engine.text.tokenizer import Tokenizer, load_tokenizer

from octavo_server.bench.names import DATASETS, FILE_DATASETS
from octavo_server.bench.sample_files import Template, burstgpt_samples, custom_samples, sharegpt_samples
from octavo_server.bench.samples import (
    InvalidDataset,
    PrefixRepetitionOptions,
    RandomOptions,
    Sample,
    prefix_repetition_samples,
    random_samples,
)
from octavo_server.cli.declared_flags import record_of

_Length = TypeVar("_Length", int, int | None)


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
