"""`InlineClient`: the server's engine in the server's own thread, so that a test can measure what each token costs.

The core runs a small model with random weights and a large vocabulary. `core_s` is the CPU time of its steps; the rest
of the thread's CPU time is the front end's and the server's.
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from octavo_engine.frontend.outputs import OutputKind, RequestOutput
from octavo_engine.frontend.request_builder import ResolvedParams, TokenizedPrompt
from octavo_engine.loop.start import find_loader, start_core
from octavo_engine.process.client import DEFAULT_LOADER
from octavo_engine.wire.sampling import SamplingParams

from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient

VOCAB_SIZE = 32_000


def write_large_vocabulary(folder: Path) -> Path:
    """Write a byte model whose vocabulary has further tokens, as real models have."""
    write_byte_model(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first = max(*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])) + 1
    tokenizer["model"]["vocab"] |= {f"word{i}": i for i in range(first, VOCAB_SIZE)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class InlineClient(ScriptedClient):
    def __init__(self, folder: Path, **config: Any) -> None:
        super().__init__(folder, **config)
        self.core, _ = start_core(self.config, find_loader(DEFAULT_LOADER))
        self.core_s = 0.0
        self._ids = itertools.count()

    async def generate(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams | ResolvedParams,
        request_id: str,
        *,
        kind: OutputKind = "cumulative",
        priority: int = 0,
        tenant: str = "",
        weight: float = 1.0,
        arrival_s: float | None = None,
        start_by_s: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestOutput, None]:
        resolved = params if isinstance(params, ResolvedParams) else self.frontend.resolve(params, priority=priority)
        core_id = f"{request_id}.{next(self._ids)}"
        request = self.frontend.build(prompt, resolved, request_id=core_id)
        assembly = self.frontend.assemble(request, prompt, request_id=request_id)
        self.core.add(request)
        try:
            while not assembly.finished:
                began_s = time.thread_time()
                outputs = self.core.step().outputs
                self.core_s += time.thread_time() - began_s
                for out in outputs:
                    if assembly.push(out, time.monotonic()):
                        self.core.abort(core_id, out.index)
                if (output := assembly.take_output(kind)) is not None:
                    yield output
                await asyncio.sleep(0)
        finally:
            self.core.abort(core_id)
