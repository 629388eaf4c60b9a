"""Grammars over a vocabulary of bytes, and random outputs that conform to them."""

import random

import numpy as np
from octavo_engine.grammar.compiler import CompiledGrammar, GrammarCompiler, Vocabulary
from octavo_engine.grammar.schema import SchemaBounds
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.grammar.state import GrammarState
from octavo_engine.wire.structured import StructuredOutputs

EOS = 256
OTHER_EOS = 257
WORD = 258  # "ab", a token of two bytes
VOCAB_SIZE = 260  # one id more than there are tokens
BOUNDS = SchemaBounds(max_bytes=20_000, max_depth=64)
_LIKELY = b'0123456789abcdefT:-.@"{}[], +Znul'


class ByteTokenizer:
    special_ids = frozenset({EOS, OTHER_EOS})

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes((token_id,))
        return {EOS: b"<eos>", OTHER_EOS: b"<end>", WORD: b"ab"}.get(token_id, b"")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def vocabulary() -> Vocabulary:
    return Vocabulary(ByteTokenizer(), vocab_size=VOCAB_SIZE, eos_token_id=EOS)  # type: ignore[arg-type]


COMPILER = GrammarCompiler(vocabulary)


def compiled(**shape: object) -> CompiledGrammar:
    return COMPILER.get(GrammarSource(BOUNDS).grammar_for(StructuredOutputs(**shape)))  # type: ignore[arg-type]


def state_of(
    *, stop_ids: tuple[int, ...] = (EOS,), min_tokens: int = 0, ignore_eos: bool = False, **shape: object
) -> GrammarState:
    return GrammarState(compiled(**shape), stop_ids=stop_ids, min_tokens=min_tokens, ignore_eos=ignore_eos)


def allowed(state: GrammarState, output: bytes | list[int], drafts: tuple[int, ...] = ()) -> list[set[int]]:
    """Return the ids allowed after the output and after each draft; fail if the grammar rejects the output."""
    rows = np.zeros((1 + len(drafts), state.num_words), dtype=np.int32)
    error = state.fill(rows, np.array(list(output), dtype=np.int32), drafts)
    assert error is None, error
    bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def follow(state: GrammarState, text: str) -> None:
    """Raise AssertionError if the grammar rejects `text`."""
    allowed(state, text.encode())


def accepts(shape: StructuredOutputs, text: str) -> bool:
    """Return whether `text` is a complete output of a shape."""
    state = GrammarState(COMPILER.get(GrammarSource(BOUNDS).grammar_for(shape)), stop_ids=(EOS,))
    try:
        return EOS in allowed(state, text.encode())[0]
    except AssertionError:
        return False


def random_output(state: GrammarState, seed: int, *, longest: int = 200, begin: str = "") -> str | None:
    """Return a complete random output that begins as given; None if it hasn't ended after `longest` more tokens."""
    chance, output = random.Random(seed), list(begin.encode())
    for _ in range(longest):
        (ids,) = allowed(state, output)
        assert ids, f"nothing may follow {bytes(output)!r}"
        if EOS in ids and (len(ids) == 1 or chance.random() < 0.5):
            return bytes(output).decode()
        closing = sorted(ids.intersection(b'"]}'))
        likely = sorted(ids.intersection(_LIKELY)) or sorted(ids.intersection(range(128))) or sorted(ids - {EOS, WORD})
        output.append(chance.choice(closing if closing and chance.random() < 0.25 else likely))
    return None
