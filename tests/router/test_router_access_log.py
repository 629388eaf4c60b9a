"""The router's access line in JSON names the request, key and replica that the replica's line of usage names."""

import json
import logging

import pytest
from octavo_engine.log_format import JsonFormatter
from octavo_server.access_log import AccessLogFilter
from octavo_testing.fleets import until
from octavo_testing.raw_http import RawConnection, request_bytes
from octavo_testing.routing import routing
from octavo_testing.scripted import write_byte_model
from octavo_testing.server import MODEL, ScriptedClient, serving


class JsonLines(logging.Handler):
    """Formats each record at once, while its request is the current one."""

    def __init__(self):
        super().__init__()
        self.setFormatter(JsonFormatter("router"))
        self.addFilter(AccessLogFilter())
        self.lines = []

    def emit(self, record):
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def access():
    handler, logger = JsonLines(), logging.getLogger("uvicorn.access")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_access_line_of_a_router_and_the_usage_line_of_its_replica_agree(tmp_path, access, stream):
    (tmp_path / "keys").write_text("alice: sk-a\n")
    log = tmp_path / "usage.jsonl"
    engine = ScriptedClient(write_byte_model(tmp_path))
    keys = {"api_key_file": (tmp_path / "keys",), "router_secret": ("s",)}
    async with (
        serving(engine, router_secret=("s",), usage_log=str(log)) as served,
        routing(served.url, **keys) as router,
    ):
        await router.routable(MODEL, 1)
        body = {"model": MODEL, "prompt": "a", "stream": stream, "request_id": "of-the-body"}
        await router.http.post("/v1/completions", json=body, headers={"Authorization": "Bearer sk-a"})
        await router.http.post("/v1/completions", json=body)
        await until(log.read_text)
    (usage,) = [json.loads(line) for line in log.read_text().splitlines()]
    of_router = [line for line in access.lines if "replica" in line]
    assert [(line["tenant"], line["code"], f"http://{line['replica']}") for line in of_router] == [
        ("alice", 200, served.url)
    ]
    assert usage["tenant"] == "alice"
    assert usage["request_id"] == of_router[0]["request_id"]
    refused = [line for line in access.lines if line["code"] == 401]
    assert [line["tenant"] for line in refused] == ["(keyless)"]


async def test_a_pipelined_request_has_nothing_of_the_one_before(tmp_path, access):
    (tmp_path / "keys").write_text("alice: sk-a\n")
    keys = {"api_key_file": (tmp_path / "keys",)}
    async with (
        serving(ScriptedClient(write_byte_model(tmp_path)), **keys) as served,
        serving(ScriptedClient(write_byte_model(tmp_path))) as replica,
        routing(replica.url, **keys) as router,
    ):
        await router.routable(MODEL, 1)
        for url in (served.url, router.url):
            body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
            named = request_bytes(body, lines=(b"Authorization: Bearer sk-a",))
            async with await RawConnection.open(int(url.rpartition(":")[2])) as connection:
                await connection.send(named + request_bytes(body))
                assert [answer.status for answer in await connection.read_answers(2)] == [200, 401]
    lines = [line for line in access.lines if line["tenant"] == "alice" or line["code"] == 401]
    refused = ("(keyless)", 401, False)
    wanted = [("alice", 200, False), refused, ("alice", 200, True), refused]
    assert [(line["tenant"], line["code"], "replica" in line) for line in lines] == wanted
