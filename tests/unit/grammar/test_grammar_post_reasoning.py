"""A grammar that begins after reasoning: output before it is free, and the grammar cannot be avoided."""

import numpy as np
import pytest
from octavo_engine.grammar.compiler import GrammarCompiler, Vocabulary
from octavo_engine.grammar.post_reasoning import PostReasoningState
from octavo_engine.grammar.schema import SchemaBounds
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.grammar.state import GrammarState
from octavo_engine.wire.structured import StructuredOutputs

EOS, START, END = 256, 257, 258
VOCAB_SIZE = 259
A, B = b"ab"


class ByteTokenizer:
    special_ids = frozenset({EOS, START, END})

    def token_bytes(self, token_id):
        return bytes((token_id,)) if token_id < EOS else b"<%d>" % token_id

    def encode(self, text, *, add_special_tokens=True):
        return list(text.encode())


@pytest.fixture(scope="module")
def compiled():
    compiler = GrammarCompiler(lambda: Vocabulary(ByteTokenizer(), vocab_size=VOCAB_SIZE, eos_token_id=EOS))
    source = GrammarSource(SchemaBounds(max_bytes=1000, max_depth=8)).grammar_for(StructuredOutputs(regex="ab"))
    yield compiler.get(source)
    compiler.shutdown()


@pytest.fixture
def allowed(compiled):
    def ask(state, output, drafts=()):
        rows = np.zeros((1 + len(drafts), -(-VOCAB_SIZE // 32)), dtype=np.int32)
        assert state.fill(rows, np.array(output, dtype=np.int32), drafts) is None
        bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little", count=VOCAB_SIZE)
        found = [set(np.flatnonzero(row).tolist()) for row in bits]
        return found if drafts else found[0]

    return ask


def reasoned(compiled, start_id):
    return PostReasoningState(GrammarState(compiled, stop_ids=[EOS]), start_id=start_id, end_id=END)


ANYTHING = set(range(VOCAB_SIZE)) - {EOS}


def test_open_reasoning_allows_all_tokens_but_the_end(compiled, allowed):
    state = reasoned(compiled, None)
    assert allowed(state, []) == ANYTHING
    assert allowed(state, [B, START, 7]) == ANYTHING
    assert allowed(state, [B, START, 7, END]) == {A}
    assert allowed(state, [B, START, 7, END, A]) == {B}
    assert allowed(state, [B, START, 7, END, A, B]) == {EOS}


def test_reasoning_may_be_started_or_omitted(compiled, allowed):
    state = reasoned(compiled, START)
    assert allowed(state, []) == {A, START}
    assert allowed(state, [START, 7]) == ANYTHING
    assert allowed(state, [START, 7, END]) == {A}
    other = reasoned(compiled, START)
    assert allowed(other, [A]) == {B}
    assert allowed(other, [A, B]) == {EOS}


def test_reasoning_ends_once(compiled, allowed):
    state = reasoned(compiled, None)
    assert allowed(state, [END]) == {A}
    assert allowed(state, [7]) == ANYTHING  # the sequence was rolled back


def test_drafts_within_reasoning_end_before_its_end(compiled, allowed):
    state, output = reasoned(compiled, None), np.array([7], dtype=np.int32)
    assert [state.num_allowed(output, drafts) for drafts in ((7, A), (7, END, A), (EOS,))] == [2, 1, 0]
    assert allowed(state, [7], (7, END)) == [ANYTHING, ANYTHING, set()]
    assert allowed(state, [7, END], (A,)) == [{A}, {B}]
    assert state.num_allowed(np.array([7, END], dtype=np.int32), (A, B, B)) == 2
