"""An engine that computes nothing: every `STEP_S` seconds each sequence gets a token of an English text.

Run as a script, this module is `octavo serve` with that engine, so that only the API process and the scheduler work.
The pace is slow enough that each token is sent separately, as with a real model. `load` is the loader of the core
process.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.settings.config import EngineConfig
from octavo_engine.settings.records import ReadyInfo
from octavo_engine.sources.progress import Advance
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.text.tokenizer import load_tokenizer
from octavo_engine.wire.errors import EngineDead, StartupError
from octavo_engine.wire.plan import SeqResult, StepPlan, StepResult
from octavo_engine.wire.sleep import MemoryTag
from octavo_server.cli import serve
from octavo_server.cli.main import main

if TYPE_CHECKING:
    from octavo_engine.runner.executor import ReadAdapter

STEP_S = 0.02
TEXT = (
    "A page is a sheet of paper folded once; a quarto is folded twice, an octavo three times, which makes eight "
    "leaves. Books of that size fit in a coat pocket, and so, when the price of paper fell, everybody read them. "
)


class PacedExecutor:
    images = None  # it takes none

    def __init__(self, token_ids: list[int]) -> None:
        self._tokens = cycle(token_ids)

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        time.sleep(STEP_S)
        sampled = [SeqResult(seq_id=s.seq_id, token_ids=[next(self._tokens)] if s.sample else []) for s in plan.seqs]
        future: Future[StepResult] = Future()
        future.set_result(StepResult(step_id=plan.step_id, seqs=sampled))
        return future

    def on_lost(self, call: Callable[[EngineDead], None]) -> None:
        """Do nothing: the executor cannot be lost."""

    def prepare(self, grammar: str) -> Future[object]:
        """Return a completed future: this engine ignores grammars."""
        future: Future[object] = Future()
        future.set_result(None)
        return future

    def prepare_adapter(self, location: str, advance: Advance) -> "Future[ReadAdapter]":
        raise StartupError(f"adapter {location}: an engine that computes nothing has no adapters.")

    def add_adapter(self, prepared: "ReadAdapter") -> None:
        raise AssertionError("no adapter was prepared")

    def remove_adapter(self, adapter: str) -> None:
        raise AssertionError("no adapter was added")

    def release(self, tag: MemoryTag) -> None:
        """Do nothing: the executor holds no memory."""

    def restore(self, tag: MemoryTag) -> None:
        """Do nothing: `release` has released nothing."""

    def shutdown(self, reason: str | None = None) -> None:
        """Do nothing: the executor holds no resources."""


def load(config: EngineConfig) -> tuple[PacedExecutor, ReadyInfo]:
    tokenizer = load_tokenizer(resolve_model(config.model))
    ready = ReadyInfo(
        max_model_len=config.max_model_len or 2048,
        num_blocks=8192,
        num_host_blocks=0,
        block_size=config.block_size,
        dtype="none",
        kv_dtype="none",
        device="none",
        weights_fingerprint="paced",
        hash_root=b"paced",
        weights_bytes=0,
        kv_bytes=0,
    )
    return PacedExecutor(tokenizer.encode(TEXT, add_special_tokens=False)), ready


class PacedLLM(AsyncLLM):
    @classmethod
    async def start(cls, config: EngineConfig, **_: Any) -> AsyncLLM:
        return await AsyncLLM.start(config, loader=f"{Path(__file__).stem}:load")


if __name__ == "__main__":
    serve.AsyncLLM = PacedLLM  # type: ignore[misc]
    sys.exit(main())
