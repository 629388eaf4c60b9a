"""Parses a text in every possible split: a parser must give the same events for each."""

import itertools
from collections.abc import Callable, Iterable, Iterator

from octavo_server.output_parsing.events import OutputEvent, merge_adjacent
from octavo_server.output_parsing.streaming_parser import StreamingParser


def parse_chunks(parser: StreamingParser, pieces: Iterable[str]) -> list[OutputEvent]:
    found = list(itertools.chain.from_iterable(map(parser.push, pieces)))
    return merge_adjacent([*found, *parser.finish()])


def all_splits(text: str) -> Iterator[list[str]]:
    """All splits into two or three chunks, and into single characters, with and without empty chunks between them."""
    for i, j in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        yield [text[:i], text[i:j], text[j:]]
    yield list(text)
    yield [piece for char in text for piece in (char, "")]


def assert_same_for_all_splits(new_parser: Callable[[], StreamingParser], text: str) -> list[OutputEvent]:
    whole = parse_chunks(new_parser(), [text])
    for pieces in all_splits(text):
        assert parse_chunks(new_parser(), pieces) == whole, pieces
    return whole


def numbered_ids() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"call-{next(counter)}"
