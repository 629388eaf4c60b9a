"""Servers for one test module each. A module that needs different settings defines its own `server` fixture.

`server` has a scripted engine in the test's event loop; `served` is the same server with its script reset. `at` is that
server, and then a router in front of it; `anthropic_client` is Anthropic's client of `at`. `llm` is an engine process
with the `config` fixture of the module; `core_server` is a server in front of such a process.
"""

import pytest
import pytest_asyncio
from octavo_testing.core_process import running
from octavo_testing.core_server import core_config, core_server, scripted_tmp
from octavo_testing.gate import Gate
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

__all__ = ["core_config", "core_server", "scripted_tmp"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    async with serving(ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")))) as started:
        yield started


@pytest.fixture
def served(server):
    server.engine.reset()
    return server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def routed(server):
    async with routing(server.url) as started:
        await started.routable(MODEL, 1)
        yield started


@pytest.fixture(params=["server", "routed"])
def at(request, served, routed):
    return served if request.param == "server" else routed


@pytest_asyncio.fixture(loop_scope="module")
async def anthropic_client(at):
    import anthropic  # imported here because most modules don't need it

    async with anthropic.AsyncAnthropic(base_url=at.url, api_key="none", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def llm(config):
    async with running(config) as started:
        yield started


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()
