"""Compiles grammars on threads of its own and keeps the latest: one compiler per vocabulary.

A compiled grammar is found again for as long as anybody holds it; beyond that a bounded number is kept. The vocabulary
is built with the first grammar, so that an engine that never gets one doesn't pay for it.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from octavo_engine.grammar.library import Vocabulary

MAX_CACHED = 256
NUM_THREADS = 2  # one grammar that takes long doesn't hold up the next


class CompiledGrammar:
    """Immutable; each sequence works on a copy."""

    __slots__ = ("__weakref__", "_start", "eos_token_id", "vocab_size")

    def __init__(self, start: LLMatcher, vocabulary: Vocabulary) -> None:
        self._start = start
        self.vocab_size = vocabulary.vocab_size
        self.eos_token_id = vocabulary.eos_token_id

    def matcher(self) -> LLMatcher:
        return self._start.deep_copy()


class GrammarCompiler:
    """Safe to use from several threads."""

    def __init__(self, load_vocabulary: Callable[[], Vocabulary], *, max_cached: int = MAX_CACHED) -> None:
        self._load_vocabulary = load_vocabulary
        self._max_cached = max_cached
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._pending: dict[str, Future[CompiledGrammar]] = {}
        self._alive: weakref.WeakValueDictionary[str, CompiledGrammar] = weakref.WeakValueDictionary()
        self._latest: OrderedDict[str, CompiledGrammar] = OrderedDict()

    def submit(self, grammar: str) -> "Future[CompiledGrammar]":
        """Done at once if it is known. Fails with GrammarError. Equal grammars in the making share one future."""
        with self._lock:
            found = self._alive.get(grammar)
            if found is not None:
                self._keep(grammar, found)
                done: Future[CompiledGrammar] = Future()
                done.set_result(found)
                return done
            pending = self._pending.get(grammar)
            if pending is None:
                pending = self._pending[grammar] = self._threads.submit(self._compile, grammar)
            return pending

    def get(self, grammar: str) -> CompiledGrammar:
        """Waits for it, if it isn't there. Raises GrammarError."""
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
