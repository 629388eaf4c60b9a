"""Decisions, metrics and state of a working router over real replicas with real caches."""

import json

import httpx
import pytest
from octavo_server.cli.main import main
from octavo_testing.route_command import octavo_route, served_replicas
from octavo_testing.server import parse_metrics

pytestmark = pytest.mark.slow

ADMIN = {"Authorization": "Bearer boss"}
TEAM = {"Authorization": "Bearer k1"}
LONG = "a prompt of several blocks, which the replica that had it once finds again, and no other does"


@pytest.fixture(scope="module")
def route(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    (folder / "keys").write_text("admin: boss\nteam: k1\n")
    with served_replicas(folder, 2) as replicas:
        flags = [word for replica in replicas for word in ("--replica", replica.url)] + ["--router-secret", "shared"]
        with octavo_route(folder, *flags, "--api-key-file", str(folder / "keys"), headers=ADMIN) as route:
            route.wait_until_exact(2)
            with httpx.Client(base_url=route.url, timeout=240, headers=TEAM) as http:
                for _ in range(4):
                    body = {"model": "tiny", "prompt": LONG, "max_tokens": 2}
                    assert http.post("/v1/completions", json=body).status_code == 200
            yield route


def test_decisions_show_expected_and_cached_tokens(route):
    latest = httpx.get(f"{route.url}/debug/decisions", headers=ADMIN).json()["decisions"]
    newest, *_, oldest = latest
    assert len({decision["chosen"] for decision in latest}) == 1
    assert (oldest["expected_tokens"], oldest["cached_tokens"]) == (0, 0)
    assert newest["expected_tokens"] == newest["cached_tokens"] == len(LONG) // 16 * 16
    assert (newest["rung"], newest["ended"], newest["code"]) == ("exact", "finished", 200)
    chosen, other = sorted(newest["candidates"], key=lambda candidate: candidate["cost_s"])
    assert (chosen["matched_blocks"], other["matched_blocks"]) == (len(LONG) // 16, 0)


def test_the_command_prints_decisions_as_a_table(route, capsys):
    assert main(["explain", "decisions", "--url", route.url, "--api-key", "boss", "-n", "1"]) == 0
    head, chosen, other = capsys.readouterr().out.splitlines()
    column = head.index("replica")
    assert chosen[column:].startswith("127.0.0.1:")
    assert other[column:].startswith("127.0.0.1:")
    assert "200 finished" in chosen


def test_the_command_names_the_required_key(route, capsys):
    assert main(["explain", "decisions", "--url", route.url, "--api-key", "k1"]) == 1
    assert "admin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"OCTAVO_ROUTER_SECRET": "shared"}, 0),
        ({"OCTAVO_ROUTER_SECRET": "another"}, 1),
        ({"OCTAVO_ROUTER_SECRET": "another", "OCTAVO_ADMIN_SECRET": "shared"}, 0),
    ],
    ids=str,
)
def test_a_secret_of_the_router_in_the_environment_is_enough(route, variables, code, monkeypatch, capsys):
    """The router's container on Kubernetes may have no API key at all."""
    for name, secret in variables.items():
        monkeypatch.setenv(name, secret)
    assert main(["explain", "decisions", "--url", route.url, "-n", "1"]) == code
    assert ("200 finished" in capsys.readouterr().out) == (code == 0)


def test_metrics_compare_expected_and_cached_tokens(route):
    found = parse_metrics(httpx.get(f"{route.url}/metrics").text)
    assert found['octavo_router_requests_total{model="tiny",code="200",reason="finished"}'] == 4
    assert found['octavo_router_decisions_total{rung="exact"}'] == 4
    assert found["octavo_router_cached_tokens_total"] > 0
    assert found['octavo_router_prediction_error_tokens_total{direction="over"}'] == 0
    assert found["octavo_router_index_divergence_ratio"] == 0
    assert found["octavo_router_index_blocks"] >= len(LONG) // 16


def test_the_state_stream_begins_with_each_replica(route):
    with httpx.stream("GET", f"{route.url}/state/events", headers=ADMIN, timeout=240) as answer:
        first = json.loads(next(answer.iter_lines()).removeprefix("data: "))
    assert (first["type"], first["state"]["models"]) == ("state", ["tiny"])
    for replica in first["state"]["replicas"]:
        assert replica["admitted"]
        assert replica["acknowledged_epoch"] == replica["epoch"]
        assert replica["load"]["total_blocks"] > 0
    assert max(replica["worth_tokens"] for replica in first["state"]["replicas"]) > 0


@pytest.mark.parametrize("path", ["/debug/decisions", "/debug/index", "/state/events"])
def test_debug_routes_require_the_administrators_key(route, path):
    assert httpx.get(route.url + path).status_code == 401
    assert httpx.get(route.url + path, headers=TEAM).status_code == 403
