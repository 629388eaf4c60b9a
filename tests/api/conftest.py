"""Servers for one test module each. A module that needs different settings defines its own `server` fixture.

`server` has a scripted engine in the test's event loop; `served` is the same server with its script reset. `llm` is an
engine process with the `config` fixture of the module; `core_server` is a server in front of such a process.
"""

import pytest
import pytest_asyncio
from octavo_engine.config import EngineConfig
from octavo_testing.core_process import running, scripted_environment
from octavo_testing.gate import Gate
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import ScriptedClient, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    async with serving(ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")))) as started:
        yield started


@pytest.fixture
def served(server):
    server.engine.reset()
    return server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(config):
    async with running(config) as started:
        yield started


@pytest.fixture(scope="module")
def scripted_tmp(tmp_path_factory):
    tmp_path_factory.getbasetemp()  # creates the folder before TMPDIR changes
    with scripted_environment() as folder:
        yield folder


@pytest.fixture(scope="module")
def core_config(tmp_path_factory, scripted_tmp):
    folder = write_byte_model(tmp_path_factory.mktemp("model"))
    return EngineConfig(model=str(folder), load_format="dummy", max_model_len=256)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def core_server(core_config):
    async with running(core_config) as started, serving(started) as server:
        yield server


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()
