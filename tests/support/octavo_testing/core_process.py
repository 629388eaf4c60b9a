"""Helpers for fixtures that run the scripted executor in a real engine core process."""

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from octavo_engine.frontend.async_llm import AsyncLLM
from octavo_engine.frontend.outputs import OutputKind, RequestOutput
from octavo_engine.settings.config import EngineConfig
from octavo_engine.wire.sampling import SamplingParams

from octavo_testing.scripted import LOADER

SUPPORT = Path(__file__).parents[1]


@contextmanager
def scripted_environment() -> Iterator[Path]:
    """Yield a short temporary folder. Child processes put their temporary files there and can import this package."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="o", dir="/tmp") as folder:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH")))))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@asynccontextmanager
async def running(config: EngineConfig, loader: str = LOADER) -> AsyncIterator[AsyncLLM]:
    llm = await AsyncLLM.start(config, loader=loader)
    try:
        yield llm
    finally:
        await llm.shutdown()


async def collect(
    llm: AsyncLLM,
    prompt: Any,
    params: SamplingParams,
    request_id: str = "r",
    kind: OutputKind = "delta",
    **arguments: Any,
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id, kind=kind, **arguments)]


def processes_of(llm: AsyncLLM) -> list[psutil.Process]:
    """Return the process of the engine core, then those of its other ranks."""
    core = psutil.Process(llm._core.pid)
    return [core, *core.children(recursive=True)]


def joined_text(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(c.text for output in outputs for c in output.outputs if c.index == index)
