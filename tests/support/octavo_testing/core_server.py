"""Fixtures of a server in front of a real engine core process, which runs the scripted executor."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from octavo_engine.settings.config import EngineConfig

from octavo_testing.core_process import running, scripted_environment
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import Served, serving


@pytest.fixture(scope="module")
def scripted_tmp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    tmp_path_factory.getbasetemp()  # creates the folder before TMPDIR changes
    with scripted_environment() as folder:
        yield folder


@pytest.fixture(scope="module")
def core_config(tmp_path_factory: pytest.TempPathFactory, scripted_tmp: Path) -> EngineConfig:
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    return EngineConfig(model=str(folder), load_format="dummy", max_model_len=256)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core_server(core_config: EngineConfig) -> AsyncIterator[Served]:
    async with running(core_config) as started, serving(started) as server:
        yield server
