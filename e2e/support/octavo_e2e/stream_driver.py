"""`StreamDriver`: long streams and frequent short requests against one service, none of which may fail."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

from openai import OpenAI, OpenAIError
from urllib3.exceptions import HTTPError

from octavo_e2e.cluster import Cluster

NUM_STREAMS, SHORT_PER_S = 12, 3
TRIAL_TOKENS, MOST_TOKENS = 60, 900
MARGIN = 1.6  # streams last longer while engines start on the same machine
END_S = 300


@dataclass(slots=True)
class StreamDriver:
    """Runs during the block; on exit waits for the last answers and asserts that none has failed and that half of the
    streams were at least `least_s` seconds long. A stream's number of tokens follows from the speed of an earlier one,
    the first of which are a trial."""

    cluster: Cluster
    host: str
    model: str
    at: str  # URL of the Service; empty for the Ingress
    least_s: float
    _tokens: int = TRIAL_TOKENS
    _threads: list[Thread] = field(default_factory=list)
    _ending: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)
    _lengths_s: list[float] = field(default_factory=list)
    _num_short: int = 0
    _failures: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        with ThreadPoolExecutor(NUM_STREAMS) as pool, self.cluster.openai(self.host, at=self.at) as client:
            for one in [pool.submit(self._stream, client) for _ in range(NUM_STREAMS)]:
                one.result()
        self._lengths_s.clear()
        self._threads = [Thread(target=self._run, args=(self._stream,)) for _ in range(NUM_STREAMS)]
        self._threads += [Thread(target=self._run, args=(self._ask_shortly,)) for _ in range(SHORT_PER_S)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._ending.set()
        deadline = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if error is None:
            assert not any(thread.is_alive() for thread in self._threads), f"no answer within {END_S} s"
            assert not self._failures, f"{len(self._failures)} failed, {self}: {self._failures[:5]}"
            assert median(self._lengths_s) >= self.least_s, f"the streams were too short: {self}"

    def __str__(self) -> str:
        shortest, longest = min(self._lengths_s, default=0), max(self._lengths_s, default=0)
        return f"{len(self._lengths_s)} streams of {shortest:.0f} to {longest:.0f} s, {self._num_short} short requests"

    def _run(self, ask: Callable[[OpenAI], None]) -> None:
        with self.cluster.openai(self.host, at=self.at) as client:
            while not self._ending.is_set():
                try:
                    ask(client)
                except (OpenAIError, HTTPError, AssertionError) as error:  # HTTPError: an incomplete response
                    with self._lock:
                        self._failures.append(f"{time.strftime('%X')} {error!r}")

    def _stream(self, client: OpenAI) -> None:
        began_s, end, tokens = time.monotonic(), None, self._tokens
        messages = [{"role": "user", "content": f"Tell a long story about number {began_s}."}]
        with client.chat.completions.create(
            model=self.model,
            messages=messages,
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as chunks:
            for chunk in chunks:
                end = chunk.choices[0].finish_reason if chunk.choices else end
        length_s = time.monotonic() - began_s
        assert end == "length", f"a stream ended with {end} after {length_s:.1f} s"
        with self._lock:
            self._lengths_s.append(length_s)
            self._tokens = min(MOST_TOKENS, round(tokens * MARGIN * self.least_s / length_s))

    def _ask_shortly(self, client: OpenAI) -> None:
        began_s = time.monotonic()
        client.completions.create(model=self.model, prompt="The capital of France is", max_tokens=1)
        with self._lock:
            self._num_short += 1
        self._ending.wait(max(0.0, began_s + 1 - time.monotonic()))
