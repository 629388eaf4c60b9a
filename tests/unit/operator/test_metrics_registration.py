"""Registration of the metrics API: whose it is, who makes the authority, and what a failure of the cluster does."""

import asyncio
import base64
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from octavo_operator.cluster.client import ApiError
from octavo_operator.metrics_api import registration
from octavo_operator.metrics_api.certificates import AUTHORITY_LIFE, make_authority, read_authority
from octavo_operator.metrics_api.registration import API_SERVICE, MetricsApi
from octavo_operator.metrics_api.server import MetricsServer

SYSTEM, NAME = "octavo-system", "octavo-metrics-api"
PROXIES = make_authority(datetime.now(UTC)).certificate.decode()
OURS = {"namespace": SYSTEM, "name": NAME}


class FakeCluster:
    """Objects by kind and name; `refuses` has the status of the answer for each path or kind."""

    def __init__(self, service: dict[str, str] | None = None, version: str = "v1beta2") -> None:
        self.preferred = version
        spec = {"service": OURS if service is None else service}
        self.objects: dict[tuple[str, str], dict[str, Any]] = {
            ("APIService", f"{version}.custom.metrics.k8s.io"): {"spec": dict(spec)},
            ("APIService", API_SERVICE): {"spec": dict(spec)},
            ("ConfigMap", "extension-apiserver-authentication"): {
                "data": {"requestheader-client-ca-file": PROXIES, "requestheader-allowed-names": '["proxy"]'}
            },
        }
        self.refuses: dict[str, int] = {}
        self.log: list[str] = []

    async def read_path(self, path: str) -> dict[str, Any]:
        self._check("group")
        return {"preferredVersion": {"version": self.preferred}}

    async def read(self, kind: str, namespace: str | None, name: str) -> dict[str, Any]:
        self._check(kind)
        if (kind, name) not in self.objects:
            raise ApiError(404, "NotFound", f"{kind} {name}")
        return self.objects[kind, name]

    async def create(self, manifest: Mapping[str, Any]) -> bool:
        self.log.append(f"create {manifest['kind']}")
        version = {"resourceVersion": "1"}
        stored = {**manifest, "metadata": manifest["metadata"] | version}
        self.objects[manifest["kind"], manifest["metadata"]["name"]] = stored
        return True

    async def replace(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        self.log.append(f"replace {manifest['kind']} version {manifest['metadata']['resourceVersion']}")
        self.objects[manifest["kind"], manifest["metadata"]["name"]] = {**manifest}
        return {}

    async def patch(self, kind: str, namespace: str | None, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        self.log.append(f"patch {kind}")
        self.objects[kind, name]["spec"] |= body["spec"]
        return {}

    def bundle(self) -> bytes:
        return base64.b64decode(self.objects["APIService", API_SERVICE]["spec"].get("caBundle", ""))

    def _check(self, what: str) -> None:
        if what in self.refuses:
            raise ApiError(self.refuses[what], "Refused", what)


class Server(MetricsServer):
    def __init__(self) -> None:
        super().__init__(lambda key: None)
        self.started = 0
        self.certificates: list[bytes] = []

    @property
    def port(self) -> int:
        return self.started

    async def use(self, certificate: bytes, proxy: Any) -> None:
        await super().use(certificate, proxy)
        self.certificates.append(certificate)

    async def start(self, port: int, host: str | None = None) -> None:
        self.started = port


class Operator:
    def __init__(self, cluster: FakeCluster, *, leads: bool = True) -> None:
        self.cluster, self.server, self.leads, self.changes = cluster, Server(), leads, 0
        self.now = datetime.now(UTC)
        made: Any = (cluster, self.server)
        self.api = MetricsApi(
            *made,
            service=(SYSTEM, NAME),
            port=8443,
            leads=lambda: self.leads,
            on_change=self._changed,
            now=lambda: self.now,
        )

    def _changed(self) -> None:
        self.changes += 1

    def bundle(self) -> bytes:
        stored = self.cluster.objects["Secret", NAME]["data"]
        found = read_authority({name: base64.b64decode(value) for name, value in stored.items()})
        assert found is not None
        return found.bundle


async def test_the_leader_makes_the_authority_once_and_registers_it() -> None:
    operator = Operator(FakeCluster())
    for _ in range(3):
        await operator.api.refresh()
    assert operator.cluster.log == ["create Secret", "patch APIService"]
    assert operator.cluster.bundle() == operator.bundle()
    assert (operator.server.started, operator.api.is_ours, operator.changes) == (8443, True, 1)
    assert len(set(operator.server.certificates)) == 1


async def test_another_operator_serves_with_the_leaders_authority_and_writes_nothing() -> None:
    cluster = FakeCluster()
    follower = Operator(cluster, leads=False)
    await follower.api.refresh()
    assert (follower.server.started, cluster.log) == (0, [])
    await Operator(cluster).api.refresh()
    cluster.log.clear()
    await follower.api.refresh()
    assert (follower.server.started, cluster.log) == (8443, [])


async def test_a_new_authority_is_in_the_bundle_before_an_operator_answers_with_it() -> None:
    operator = Operator(FakeCluster())
    await operator.api.refresh()
    old = operator.bundle()
    operator.cluster.log.clear()
    operator.now += timedelta(days=AUTHORITY_LIFE.days * 0.7)
    await operator.api.refresh()
    assert operator.cluster.log == ["patch APIService", "replace Secret version 1"]
    assert operator.bundle() == operator.cluster.bundle()
    assert operator.bundle().endswith(old)
    assert operator.bundle() != old


async def test_a_bundle_that_helm_has_reset_is_written_again() -> None:
    operator = Operator(FakeCluster())
    await operator.api.refresh()
    del operator.cluster.objects["APIService", API_SERVICE]["spec"]["caBundle"]
    await operator.api.refresh()
    assert operator.cluster.bundle() == operator.bundle()


async def test_a_server_certificate_is_renewed_in_time() -> None:
    operator = Operator(FakeCluster())
    await operator.api.refresh()
    operator.now += timedelta(days=25)
    await operator.api.refresh()
    assert len(set(operator.server.certificates)) == 2


@pytest.mark.parametrize(
    ("cluster", "is_ours"),
    [
        pytest.param(FakeCluster(), True, id="the operator's Service"),
        pytest.param(FakeCluster({"namespace": "monitoring", "name": "prometheus-adapter"}), False, id="another one"),
        pytest.param(FakeCluster({"namespace": "x", "name": "y"}, version="v1beta1"), False, id="an older version"),
        pytest.param(FakeCluster({}), False, id="the API server itself"),
    ],
)
async def test_hpas_are_used_if_the_preferred_version_is_ours(cluster: FakeCluster, is_ours: bool) -> None:
    operator = Operator(cluster, leads=False)
    await operator.api.refresh()
    assert operator.api.is_ours == is_ours


async def test_the_owner_is_known_before_the_api_is_served() -> None:
    """The first plan of a starting operator would delete all HPAs otherwise."""
    operator = Operator(FakeCluster())
    operator.cluster.refuses["ConfigMap"] = 403
    await operator.api.find_owner()
    assert (operator.api.is_ours, operator.changes, operator.cluster.log) == (True, 1, [])


async def test_an_api_that_another_project_takes_over_is_noticed_and_an_outage_changes_nothing() -> None:
    operator = Operator(FakeCluster())
    await operator.api.refresh()
    operator.cluster.refuses["group"] = 503
    with pytest.raises(ApiError):
        await operator.api.refresh()
    assert operator.api.is_ours
    operator.cluster.refuses["group"] = 404
    await operator.api.refresh()
    assert (operator.api.is_ours, operator.changes) == (False, 2)


async def test_an_unexpected_error_does_not_end_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "SOON_S", 0.0)
    operator = Operator(FakeCluster())
    taken = operator.cluster.objects.pop(("ConfigMap", "extension-apiserver-authentication"))
    operator.cluster.objects["ConfigMap", "extension-apiserver-authentication"] = {"data": 7}
    running = asyncio.create_task(operator.api.run())
    while ("Secret", NAME) not in operator.cluster.objects:
        await asyncio.sleep(0)
    assert not running.done()
    operator.cluster.objects["ConfigMap", "extension-apiserver-authentication"] = taken
    while not operator.server.started:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait((running,))


@pytest.mark.parametrize("names", [None, "", "null", "[]"])
async def test_a_cluster_may_admit_front_proxies_of_any_name(names: str | None) -> None:
    operator = Operator(FakeCluster())
    data = operator.cluster.objects["ConfigMap", "extension-apiserver-authentication"]["data"]
    data["requestheader-allowed-names"] = names
    await operator.api.refresh()
    assert operator.server.started == 8443


@pytest.mark.parametrize("names", ["0", "front-proxy-client", '{"a": 1}', "{}", "[1]"])
async def test_names_of_front_proxies_that_cannot_be_read_are_an_error_of_the_api_alone(names: str) -> None:
    operator = Operator(FakeCluster())
    data = operator.cluster.objects["ConfigMap", "extension-apiserver-authentication"]["data"]
    data["requestheader-allowed-names"] = names
    with pytest.raises(ValueError, match="requestheader-allowed-names"):
        await operator.api.refresh()


async def test_a_cluster_without_a_front_proxy_is_named() -> None:
    operator = Operator(FakeCluster())
    operator.cluster.objects["ConfigMap", "extension-apiserver-authentication"] = {"data": {}}
    with pytest.raises(ValueError, match="enable the aggregation layer"):
        await operator.api.refresh()
    assert operator.server.started == 0
