"""Admin, debug, metrics, state and KV paths are 404 through the Ingress for every caller while the service is Ready.

The router's admin port serves them to requests with its admin secret, and engines to those with the router's secret.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
from octavo_e2e.admin_paths import ENGINE, METHODS, NOT_FOR_CLIENTS, PROBES, ROUTER, SPELLINGS
from octavo_e2e.cluster import Cluster, is_ready

HOST, NAME = "smollm2.example.test", "smollm2"
ROUTER_POD = f"deploy/{NAME}-router"
ADMIN_URL, ENGINE_PORT = "http://127.0.0.1:8001", 8000
REFUSED = {401, 403}
CHAT = {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
CLIENT_REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": NAME, "prompt": "Hello", "max_tokens": 1},
    "/v1/responses": {"model": NAME, "input": "Hello", "max_output_tokens": 16},
    "/v1/chat/completions/render": CHAT,
    "/tokenize": {"model": NAME, "prompt": "Hello"},
    "/detokenize": {"model": NAME, "tokens": [1, 2]},
}
#: Runs in a router's container as `python -c ASK URL VARIABLE PATHS`; prints the status of each path as JSON. VARIABLE
#: has the secret that is sent; empty: none is sent.
ASK = """
import json, os, sys, urllib.error, urllib.request
url, variable, paths = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
headers = {"x-octavo-secret": os.environ[variable]} if variable else {}
def ask(path):
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
print(json.dumps({path: ask(path) for path in paths}))
"""


@pytest.fixture(autouse=True)
def ready_throughout(smollm2: str, cluster: Cluster) -> Iterator[None]:
    """The service must be ready throughout: a service that is down would return 404, too."""
    cluster.until_ready(smollm2, NAME)
    yield
    service = cluster.get("InferenceService", smollm2, NAME)
    assert service is not None
    assert is_ready(service)


@pytest.fixture(scope="module")
def secret(smollm2: str, cluster: Cluster) -> str:
    path = ("-o", "jsonpath={.data.secret}")
    encoded = cluster.kubectl("get", "secret", f"{NAME}-router-secret", "-n", smollm2, *path)
    return base64.b64decode(encoded).decode()


def _asked(cluster: Cluster, namespace: str, url: str, paths: Sequence[str], variable: str = "") -> Mapping[str, int]:
    """Status of a request for each path, sent from a router's container."""
    command = ("python", "-c", ASK, url, variable, json.dumps(paths))
    found: dict[str, int] = json.loads(cluster.kubectl("exec", "-n", namespace, ROUTER_POD, "--", *command))
    return found


@pytest.mark.parametrize("has_secret", [False, True], ids=["without credentials", "with the secret"])
def test_admin_paths_are_404_through_the_ingress(cluster: Cluster, secret: str, has_secret: bool) -> None:
    headers = {"x-octavo-secret": secret} if has_secret else {}
    asked = list(product(METHODS, NOT_FOR_CLIENTS))
    found = {(method, path): cluster.status(HOST, path, method=method, headers=headers) for method, path in asked}
    assert found == dict.fromkeys(asked, 404)


@pytest.mark.parametrize("target", SPELLINGS)
def test_other_spellings_of_metrics_are_refused_through_the_ingress(cluster: Cluster, target: str) -> None:
    assert cluster.status(HOST, target) in (400, 404)


def test_client_paths_and_probes_work_through_the_ingress(cluster: Cluster) -> None:
    listed = ("/v1/models", f"/v1/models/{NAME}", *PROBES)
    found = {path: cluster.status(HOST, path) for path in listed}
    found |= {path: cluster.status(HOST, path, method="POST", body=body) for path, body in CLIENT_REQUESTS.items()}
    assert found == dict.fromkeys([*listed, *CLIENT_REQUESTS], 200)


def test_the_admin_port_serves_admin_paths_and_no_client_paths(smollm2: str, cluster: Cluster) -> None:
    here, clients = (*ROUTER, *PROBES), ("/v1/models", *CLIENT_REQUESTS)
    found = _asked(cluster, smollm2, ADMIN_URL, [*here, *clients], "OCTAVO_ADMIN_SECRET")
    assert found == dict.fromkeys(here, 200) | dict.fromkeys(clients, 404)


def test_the_admin_port_requires_the_admin_secret_except_for_metrics_and_probes(smollm2: str, cluster: Cluster) -> None:
    for variable in ("", "OCTAVO_ROUTER_SECRET"):  # engines have that one, too
        found = _asked(cluster, smollm2, ADMIN_URL, [*ROUTER, *PROBES], variable)
        assert {path for path, status in found.items() if status == 200} == {"/metrics", *PROBES}
        assert {status for status in found.values() if status != 200} <= REFUSED


def test_no_kubernetes_service_exposes_the_admin_port(smollm2: str, cluster: Cluster) -> None:
    for service in cluster.find("Service", smollm2, f"serving.octavo.dev/service={NAME}"):
        assert [port["targetPort"] for port in service["spec"]["ports"]] == ["http"]


def test_engines_require_the_routers_secret_over_http(smollm2: str, cluster: Cluster) -> None:
    label = f"serving.octavo.dev/service={NAME},app.kubernetes.io/component=engine"
    engine, *_ = cluster.find("Pod", smollm2, label)
    url, probes = f"http://{engine['status']['podIP']}:{ENGINE_PORT}", (*PROBES, "/metrics")
    found = _asked(cluster, smollm2, url, [*ENGINE, "/v1/models", *probes])
    assert {path for path, status in found.items() if status == 200} == {*probes}
    assert {status for status in found.values() if status != 200} <= REFUSED
    known = ["/v1/models", "/kv/model", "/debug/requests"]
    assert _asked(cluster, smollm2, url, known, "OCTAVO_ROUTER_SECRET") == dict.fromkeys(known, 200)


def test_decisions_are_explained_in_a_routers_container(smollm2: str, cluster: Cluster) -> None:
    assert cluster.status(HOST, "/v1/chat/completions", method="POST", body=CHAT) == 200
    command = ("octavo", "explain", "decisions", "--url", ADMIN_URL, "-n", "1", "--json")
    (line,) = cluster.kubectl("exec", "-n", smollm2, ROUTER_POD, "--", *command).splitlines()
    assert json.loads(line)["model"] == NAME
