"""What load balancers and old clients send, to the engine's server and to a router: probes by HEAD."""

import pytest
import pytest_asyncio
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both(tmp_path_factory):
    engine = ScriptedClient(write_byte_model(tmp_path_factory.mktemp("model")))
    async with serving(engine) as served, routing(served.url) as routed:
        await routed.routable(MODEL, 1)
        yield {"engine": served, "router": routed}


@pytest.fixture(params=["engine", "router"])
def asked(both, request):
    both["engine"].engine.reset()
    return both[request.param]


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_a_probe_may_ask_by_head(asked, path):
    got, head = await asked.http.get(path), await asked.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(got.content))


async def test_a_probe_by_head_hears_that_the_router_drains(both):
    routed = both["router"]
    routed.router.lifecycle.drain()
    assert (await routed.http.head("/ready")).status_code == 503
    routed.router.lifecycle.resume()
    assert (await routed.http.head("/ready")).status_code == 200
