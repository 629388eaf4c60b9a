"""Checks and compiles grammars within limits, with llguidance: one `GrammarCompiler` per vocabulary caches the results.

A compiled grammar stays available while a sequence references it, and the latest ones are kept in any case: up to 256,
with up to 1 MiB of text. The vocabulary is built with the first grammar, so that an engine without grammars does not
pay for it. llguidance returns errors as values; this module raises GrammarError instead. The library releases the GIL
while it compiles grammars and computes masks. docs/internals/structured-output.md explains the choice of this library.
"""

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from octavo_engine.settings.records import MAX_GRAMMAR_BYTES
from octavo_engine.text.tokenizer import Tokenizer
from octavo_engine.wire.errors import InvalidRequest, OctavoError
from octavo_engine.wire.structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

P = ParamSpec("P")
T = TypeVar("T")

MAX_CACHED = 256
#: Characters of the cached grammars' texts. A compiled grammar takes 70 to 220 bytes of memory for each one.
MAX_CACHED_CHARS = 1 << 20
NUM_THREADS = 2  # a slow grammar does not delay the next grammar
SILENT = 0
INITIAL_LEXER_FUEL = 100_000
MAX_LEXER_STATES = 50_000  # each takes 1 to 2 kB
#: Sets of tokens that the library allows or skips as a whole, in addition to its own sets, which suit JSON. With them a
#: regex of prose or names costs 15 µs per mask instead of 130 to 430 µs, and a vocabulary takes 40 ms more to load.
MORE_SLICES = ("[a-z ]+", "[A-Za-z ]+", "[A-Za-z0-9_]+")
#: Whitespace between JSON tokens, unless the request sets it: none, one space, or a newline with indentation. Without
#: this limit, a small model may generate only whitespace until it reaches max_tokens.
WHITESPACE = r"( ?|\n[ \t]{0,24})"
#: Escapes allowed in JSON, one spelling per character. With \u and \/ one key could be written twice, in two spellings.
ESCAPES = '"\\bfnrt'
#: Stack size of a thread that compiles. The library recurses into references and nested parts: up to 0.75 KiB of stack
#: per byte of a grammar. A stack overflow would end the process; unused pages of a stack take no memory.
STACK_BYTES = MAX_GRAMMAR_BYTES << 10


class GrammarError(OctavoError):
    """The library cannot compile a grammar; the message is the library's."""


def parser_limits() -> LLParserLimits:
    """Return the library's default work limits with a tenth of its initial lexer fuel, and short error messages.

    A regex such as `x{10000000}` uses all the fuel: with the default it took 1 s and 80 MiB at the first mask, while
    all sequences waited.
    """
    return LLParserLimits(
        verbose_errors=False, initial_lexer_fuel=INITIAL_LEXER_FUEL, max_lexer_states=MAX_LEXER_STATES
    )


class DeepThreads(ThreadPoolExecutor):
    """Threads with stacks of `STACK_BYTES`. A thread that other code starts at the same moment may get one, too."""

    _resizing = threading.Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with self._resizing:
            usual = threading.stack_size(STACK_BYTES)
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                threading.stack_size(usual)


def check_grammar(grammar: str) -> None:
    """Check a grammar without a vocabulary. Raises GrammarError, also if llguidance would ignore a part of it."""
    with DeepThreads(1, thread_name_prefix="grammar-check") as thread:  # one for each check, as a fork ends threads
        check = thread.submit(LLMatcher.validate_grammar_with_warnings, grammar, limits=parser_limits())
    _, messages = check.result()
    if messages:
        raise GrammarError(messages[0].strip())


def json_options(shape: StructuredOutputs) -> "JsonCompileOptions":
    options: JsonCompileOptions = {"lenient": False, "json_allowed_escapes": ESCAPES}
    if shape.disable_any_whitespace:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": shape.whitespace_pattern or WHITESPACE}


def grammar_of_schema(schema: dict[str, Any], options: "JsonCompileOptions") -> str:
    """Return the checked grammar of a schema. Raises GrammarError."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    except ValueError as error:  # the library's parser of JSON is stricter than Python's
        raise GrammarError(str(error)) from error
    check_grammar(grammar)
    return grammar


class Vocabulary:
    """The token trie of llguidance, for which only `eos_token_id` ends a text; `GrammarState` has all end ids."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.vocab_size = vocab_size
        slices = [*LLTokenizer.general_slices(), *MORE_SLICES]
        wrapper = _Wrapper(tokenizer, vocab_size, eos_token_id)
        self._trie = LLTokenizer(wrapper, eos_token=[eos_token_id], slices=slices)

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher in its start state, to be copied for each sequence. Raises GrammarError."""
        matcher = LLMatcher(self._trie, grammar, log_level=SILENT, limits=parser_limits())
        if matcher.is_error():
            raise GrammarError(matcher.get_error().strip())
        return matcher


class _Wrapper(TokenizerWrapper):
    """The tokenizer that llguidance calls. Special tokens are listed separately, because no grammar's text has them."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in {*tokenizer.special_ids, eos_token_id} if i < vocab_size)
        self._tokenizer = tokenizer
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokenise text that a grammar forces: by the model's tokenizer, if its tokens have exactly these bytes."""
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        except (UnicodeDecodeError, InvalidRequest):
            return self._greedy(data)
        is_exact = b"".join(self.tokens[i] for i in ids) == data and not set(ids).intersection(self.special_token_ids)
        return ids if is_exact else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """Tokenise by longest match, without the space that SentencePiece puts before a text."""
        ids: list[int] = []
        position = 0
        while position < len(data):
            token = self._longest_at(data, position)
            if token is None:
                break
            ids.append(self._ids[token])
            position += len(token)
        return ids

    def _longest_at(self, data: bytes, position: int) -> bytes | None:
        ends: Sequence[int] = range(min(position + self._longest, len(data)), position, -1)
        return next((piece for end in ends if (piece := data[position:end]) in self._ids), None)


class CompiledGrammar:
    """An immutable compiled grammar; each sequence works on a copy of its matcher."""

    __slots__ = ("__weakref__", "_start", "eos_token_id", "vocab_size")

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary) -> None:
        self._start = start
        self.vocab_size = vocabulary.vocab_size
        self.eos_token_id = vocabulary.eos_token_id

    def matcher(self) -> LLMatcher:
        return self._start.deep_copy()


class LatestTexts(Generic[T]):
    """A thread-safe cache of values by text: the latest ones, up to a number of texts and of their characters."""

    def __init__(self, *, max_texts: int = MAX_CACHED, max_chars: int = MAX_CACHED_CHARS) -> None:
        self._max_texts, self._max_chars = max_texts, max_chars
        self._num_chars = 0
        self._values: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, text: str) -> T | None:
        with self._lock:
            if text in self._values:
                self._values.move_to_end(text)
            return self._values.get(text)

    def put(self, text: str, value: T) -> None:
        with self._lock:
            if text not in self._values:
                self._num_chars += len(text)
            self._values[text] = value
            self._values.move_to_end(text)
            while len(self._values) > self._max_texts or self._num_chars > self._max_chars:
                evicted, _ = self._values.popitem(last=False)
                self._num_chars -= len(evicted)


class GrammarCompiler:
    """A thread-safe compiler and cache of grammars."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        *,
        max_cached: int = MAX_CACHED,
        max_cached_chars: int = MAX_CACHED_CHARS,
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._threads = DeepThreads(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._pending: dict[str, Future[CompiledGrammar]] = {}
        self._alive: weakref.WeakValueDictionary[str, CompiledGrammar] = weakref.WeakValueDictionary()
        self._latest: LatestTexts[CompiledGrammar] = LatestTexts(max_texts=max_cached, max_chars=max_cached_chars)

    def submit(self, grammar: str) -> "Future[CompiledGrammar]":
        """Return a future of the compiled grammar; it fails with GrammarError. For a cached grammar it is done at once.

        Concurrent calls with equal grammars share one future.
        """
        with self._lock:
            compiled = self._alive.get(grammar)
            if compiled is not None:
                self._latest.put(grammar, compiled)
                done: Future[CompiledGrammar] = Future()
                done.set_result(compiled)
                return done
            pending = self._pending.get(grammar)
            if pending is None:
                pending = self._pending[grammar] = self._threads.submit(self._compile, grammar)
            return pending

    def get(self, grammar: str) -> CompiledGrammar:
        """Return the compiled grammar, and block until it is compiled. Raises GrammarError."""
        return self.submit(grammar).result()

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def num_cached(self) -> int:
        return len(self._latest)

    def _compile(self, grammar: str) -> CompiledGrammar:
        try:
            with self._loading:
                vocabulary = self._vocabulary = self._vocabulary or self._load_vocabulary()
            compiled = CompiledGrammar(vocabulary.compile(grammar), vocabulary)
            with self._lock:
                self._alive[grammar] = compiled
                self._latest.put(grammar, compiled)
            return compiled
        finally:
            with self._lock:
                self._pending.pop(grammar, None)
