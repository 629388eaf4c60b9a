"""The progress bar of `LLM`, which shows the rates of input and output tokens."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from octavo_engine.frontend.assembly import RequestAssembly


class ProgressBar:
    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar = bar
        self._started_s = time.monotonic()
        self._input_tokens = 0
        self._output_tokens = 0

    def add(self, finished: RequestAssembly) -> None:
        self._input_tokens += len(finished.request.prompt_token_ids)
        self._output_tokens += sum(len(s.token_ids) for s in finished.sequences)
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        rates = (self._input_tokens / elapsed_s, self._output_tokens / elapsed_s)
        self._bar.set_postfix_str("input: {:.1f} tok/s, output: {:.1f} tok/s".format(*rates), refresh=False)
        self._bar.update(1)


@contextmanager
def progress_bar(total: int, *, enabled: bool) -> Iterator[ProgressBar]:
    with tqdm(total=total, desc="Processed prompts", dynamic_ncols=True, disable=not enabled) as bar:
        yield ProgressBar(bar)
