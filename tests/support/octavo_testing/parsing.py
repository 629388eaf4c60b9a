"""Splits of a text into pieces: a streaming parser must give the same result for every split."""

import itertools
from collections.abc import Callable, Iterable, Iterator

from octavo_server.reading.parts import Part, merge
from octavo_server.reading.pieces import PieceReader


def parse_chunks(reader: PieceReader, pieces: Iterable[str]) -> list[Part]:
    found = list(itertools.chain.from_iterable(map(reader.push, pieces)))
    return merge([*found, *reader.finish()])


def all_splits(text: str) -> Iterator[list[str]]:
    """Yield every split of the text into three pieces, which may be empty, and the split into single characters."""
    for i, j in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        yield [text[:i], text[i:j], text[j:]]
    yield list(text)
    yield [piece for char in text for piece in (char, "")]


def assert_same_for_all_splits(new_parser: Callable[[], PieceReader], text: str) -> list[Part]:
    whole = parse_chunks(new_parser(), [text])
    for pieces in all_splits(text):
        assert parse_chunks(new_parser(), pieces) == whole, pieces
    return whole


def numbered_ids() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"call-{next(counter)}"
