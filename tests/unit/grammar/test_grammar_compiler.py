"""Compiled grammars: one for equal texts, kept while referenced; a bounded number is cached beyond that."""

import gc
import threading

import pytest
from octavo_engine.grammar.compiler import GrammarCompiler, GrammarError
from octavo_engine.grammar.schema import SchemaBounds
from octavo_engine.grammar.source import GrammarSource
from octavo_engine.wire.structured import StructuredOutputs
from octavo_testing.grammars import vocabulary


def regex(text):
    return GrammarSource(SchemaBounds(max_bytes=1000, max_depth=8)).grammar_for(StructuredOutputs(regex=text))


@pytest.fixture
def loaded():
    return []


@pytest.fixture
def compiler(loaded):
    def load():
        loaded.append(True)
        return vocabulary()

    made = GrammarCompiler(load, max_cached=2)
    yield made
    made.shutdown()


def test_the_vocabulary_is_built_once_and_only_for_a_grammar(compiler, loaded):
    assert not loaded
    compiler.get(regex("a"))
    compiler.get(regex("b"))
    assert len(loaded) == 1


def test_equal_grammars_give_one_object(compiler):
    first = compiler.get(regex("a+"))
    assert compiler.submit(regex("a+")).result(timeout=0) is first
    assert compiler.get(regex("b+")) is not first


def test_equal_grammars_are_compiled_once_concurrently():
    loading, go_on = threading.Event(), threading.Event()

    def load():
        loading.set()
        go_on.wait()
        return vocabulary()

    compiler = GrammarCompiler(load)
    first = compiler.submit(regex("a+"))
    loading.wait()
    assert compiler.submit(regex("a+")) is first
    assert not first.done()
    go_on.set()
    assert compiler.get(regex("a+")) is first.result()
    compiler.shutdown()


def test_only_the_latest_are_kept(compiler):
    for text in ("a", "b", "c", "d"):
        compiler.get(regex(text))
    assert compiler.num_cached == 2


def test_grammars_are_kept_up_to_a_number_of_characters():
    short, other, long = regex("a"), regex("b"), regex("c" * 100)
    compiler = GrammarCompiler(vocabulary, max_cached_chars=len(long))
    numbers = []
    for grammar in (short, short, other, long, long + " ", short):
        compiler.get(grammar)
        numbers.append(compiler.num_cached)
    compiler.shutdown()
    assert numbers == [1, 1, 2, 1, 0, 1]


def test_a_referenced_grammar_is_found_after_newer_grammars(compiler):
    held = compiler.get(regex("held"))
    for text in ("a", "b", "c"):
        compiler.get(regex(text))
    assert compiler.get(regex("held")) is held


def test_an_unreferenced_grammar_is_freed(compiler):
    compiler.get(regex("gone"))
    for text in ("a", "b", "c"):
        compiler.get(regex(text))
    gc.collect()
    assert not compiler.submit(regex("gone")).done() or compiler.num_cached == 2


def test_a_grammar_that_does_not_compile_fails_alone(compiler):
    broken = compiler.submit('{"grammars": [{"lark_grammar": "start: /(/"}]}')
    with pytest.raises(GrammarError):
        broken.result()
    assert compiler.get(regex("a")) is not None
