"""`GrammarCompiler`: compiles grammars on its own threads and caches the results; one compiler per vocabulary.

A compiled grammar stays available while a sequence references it, and the latest 256 are kept in any case. The
vocabulary is built with the first grammar, so that an engine without grammars does not pay for it.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

from llguidance import LLMatcher

from octavo_engine.grammar.library import DeepThreads, Vocabulary

MAX_CACHED = 256
NUM_THREADS = 2  # a slow grammar does not delay the next grammar


class CompiledGrammar:
    """An immutable compiled grammar; each sequence works on a copy of its matcher."""

    __slots__ = ("__weakref__", "_start", "eos_token_id", "vocab_size")

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary) -> None:
        self._start = start
        self.vocab_size = vocabulary.vocab_size
        self.eos_token_id = vocabulary.eos_token_id

    def matcher(self) -> LLMatcher:
        return self._start.deep_copy()


class GrammarCompiler:
    """A thread-safe compiler and cache of grammars."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], *, max_cached: int = MAX_CACHED) -> None:
        self._load_vocabulary = load_vocabulary
        self._max_cached = max_cached
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._threads = DeepThreads(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._pending: dict[str, Future[CompiledGrammar]] = {}
        self._alive: weakref.WeakValueDictionary[str, CompiledGrammar] = weakref.WeakValueDictionary()
        self._latest: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def submit(self, grammar: str) -> "Future[CompiledGrammar]":
        """Return a future of the compiled grammar; it fails with GrammarError. For a cached grammar it is done at once.

        Concurrent calls with equal grammars share one future.
        """
        with self._lock:
            compiled = self._alive.get(grammar)
            if compiled is not None:
                self._keep(grammar, compiled)
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
                self._keep(grammar, compiled)
            return compiled
        finally:
            with self._lock:
                self._pending.pop(grammar, None)

    def _keep(self, grammar: str, compiled: CompiledGrammar) -> None:
        self._latest[grammar] = compiled
        self._latest.move_to_end(grammar)
        while len(self._latest) > self._max_cached:
            self._latest.popitem(last=False)
