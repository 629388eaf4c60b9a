"""Vocabularies of both alphabets, SentencePiece and byte-level, made from GGUF metadata by the bytes of tokens."""

import numpy as np
import pytest
from octavo_engine.grammar.compiler import GrammarCompiler, Vocabulary
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.grammar.state import GrammarState
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.grammars import BOUNDS, allowed
from octavo_testing.tiny_tokenizers import byte_level_tokenizer, sentence_piece_tokenizer

MAKERS = [byte_level_tokenizer, sentence_piece_tokenizer]


@pytest.mark.parametrize("make", MAKERS, ids=["byte level", "SentencePiece"])
def test_every_token_whose_bytes_continue_the_text_is_allowed(make):
    tokenizer = make()
    end = tokenizer.eos_token_id
    vocabulary = Vocabulary(tokenizer, vocab_size=tokenizer.vocab_size + 3, eos_token_id=end)
    compiler = GrammarCompiler(lambda: vocabulary)
    grammar = GrammarSource(BOUNDS).grammar_for(StructuredOutputs(regex="[ a-z]*"))
    state = GrammarState(compiler.get(grammar), stop_ids=[end])
    letters = set(b" abcdefghijklmnopqrstuvwxyz")
    fitting = {
        token_id
        for token_id in range(tokenizer.vocab_size)
        if token_id not in tokenizer.special_ids and (data := tokenizer.token_bytes(token_id)) and set(data) <= letters
    }
    assert fitting
    assert allowed(state, b"") == [fitting | {end}]
    compiler.shutdown()


@pytest.mark.parametrize("make", MAKERS, ids=["byte level", "SentencePiece"])
def test_forced_text_is_spelt_in_its_own_bytes(make):
    """SentencePiece would put a space before it."""
    tokenizer = make()
    end = tokenizer.eos_token_id
    compiler = GrammarCompiler(lambda: Vocabulary(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_id=end))
    text = "\N{EURO SIGN}" if make is sentence_piece_tokenizer else "ab"
    state = GrammarState(
        compiler.get(GrammarSource(BOUNDS).grammar_for(StructuredOutputs(choice=[text]))), stop_ids=[end]
    )
    output: list[int] = []
    while (ids := allowed(state, output)[0]) != {end}:
        output.append(min(ids))
    assert b"".join(map(tokenizer.token_bytes, output)) == text.encode()
    assert np.all(np.array(output) < tokenizer.vocab_size)
    compiler.shutdown()
