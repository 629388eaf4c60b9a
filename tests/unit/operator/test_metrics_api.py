"""The metrics API over real TLS: its documents, who is admitted, and certificates that are replaced while it runs."""

import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from octavo_operator.metrics_api.certificates import (
    AUTHORITY_LIFE,
    Authority,
    authority_entries,
    is_due,
    make_authority,
    make_server_certificate,
    read_authority,
    renewed,
)
from octavo_operator.metrics_api.server import GROUP_VERSION, METRICS, RESOURCE, ROOT, FrontProxy, MetricsServer
from octavo_operator.scaling.service_load import ServiceLoad

PROXY = "front-proxy-client"
HOST = "octavo-metrics-api.octavo-system.svc"
LOADS = {("team", "llm"): ServiceLoad(kv_used_replicas=1.2346, waiting_requests=7), ("team", "silent"): None}
NOW = datetime.now(UTC)


def _at(days: float) -> datetime:
    return NOW + timedelta(days=days)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return make_authority(NOW)


@pytest.fixture(scope="module")
def proxies() -> Authority:
    """The authority of the API server's front proxy."""
    return make_authority(NOW)


@pytest.fixture
async def server(authority: Authority, proxies: Authority) -> AsyncIterator[MetricsServer]:
    made = MetricsServer(lambda key: LOADS.get(key))
    await made.use(make_server_certificate(authority, HOST, NOW), FrontProxy(proxies.certificate.decode(), (PROXY,)))
    await made.start(0, "127.0.0.1")
    yield made
    await made.stop()


def _client(trusted: Authority, shows: Authority | None, folder: Path) -> ssl.SSLContext:
    """A client that trusts an authority, and shows a certificate of another one."""
    context = ssl.create_default_context(cadata=trusted.bundle.decode())
    if shows is not None:
        path = folder / "client.pem"
        path.write_bytes(_client_certificate(shows))
        context.load_cert_chain(path)
    return context


def _client_certificate(authority: Authority) -> bytes:
    """A certificate of the front proxy, with its key."""
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    signing_key, key = load_pem_private_key(authority.key, None), ec.generate_private_key(ec.SECP256R1())
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, PROXY)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(hours=1))
        .not_valid_after(NOW + timedelta(hours=1))
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
        .sign(signing_key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return made.public_bytes(Encoding.PEM) + private


def _intermediate_of(root: Authority) -> Authority:
    """An authority whose certificate another one has signed."""
    made, signing_key = make_authority(NOW), load_pem_private_key(root.key, None)
    assert isinstance(signing_key, ec.EllipticCurvePrivateKey)
    own, issuer = (x509.load_pem_x509_certificate(one.certificate) for one in (made, root))
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "intermediate")]))
        .issuer_name(issuer.subject)
        .public_key(own.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - timedelta(hours=1))
        .not_valid_after(NOW + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    return Authority(builder.sign(signing_key, SHA256()).public_bytes(Encoding.PEM), made.key)


async def _get(server: MetricsServer, path: str, context: ssl.SSLContext) -> tuple[int, dict[str, Any]]:
    url = f"https://127.0.0.1:{server.port}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, ssl=context, server_hostname=HOST) as answer,
    ):
        return answer.status, await answer.json()


@pytest.mark.parametrize(("metric", "value"), [("kv_used_replicas", "1235m"), ("waiting_requests", "7000m")])
async def test_a_metric_of_a_service_is_answered(
    server: MetricsServer, authority: Authority, proxies: Authority, tmp_path: Path, metric: str, value: str
) -> None:
    path = f"{ROOT}/namespaces/team/{RESOURCE}/llm/{metric}"
    status, content = await _get(server, path, _client(authority, proxies, tmp_path))
    assert (status, content["kind"], content["apiVersion"]) == (200, "MetricValueList", GROUP_VERSION)
    (item,) = content["items"]
    assert (item["metric"]["name"], item["value"]) == (metric, value)
    assert item["describedObject"]["name"] == "llm"
    assert datetime.fromisoformat(item["timestamp"]).tzinfo is not None


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("team/{}/llm/cpu", "there is no metric"),
        ("team/{}/silent/kv_used_replicas", "has not reported"),
        ("team/{}/absent/waiting_requests", "does not exist"),
    ],
)
async def test_an_unknown_value_is_a_404_in_the_form_of_kubernetes(
    server: MetricsServer, authority: Authority, proxies: Authority, tmp_path: Path, place: str, says: str
) -> None:
    path = f"{ROOT}/namespaces/{place.format(RESOURCE)}"
    status, content = await _get(server, path, _client(authority, proxies, tmp_path))
    assert (status, content["kind"], content["reason"], content["code"]) == (404, "Status", "NotFound", 404)
    assert says in content["message"]


async def test_the_resources_can_be_discovered(
    server: MetricsServer, authority: Authority, proxies: Authority, tmp_path: Path
) -> None:
    status, content = await _get(server, ROOT, _client(authority, proxies, tmp_path))
    assert status == 200
    assert {resource["name"] for resource in content["resources"]} == {f"{RESOURCE}/{metric}" for metric in METRICS}
    status, content = await _get(server, "/metrics", _client(authority, proxies, tmp_path))
    assert (status, content["kind"]) == (404, "Status")


@pytest.mark.parametrize("shows", ["nothing", "another authority"])
async def test_other_clients_are_refused_by_tls(
    server: MetricsServer, authority: Authority, tmp_path: Path, shows: str
) -> None:
    other = None if shows == "nothing" else make_authority(NOW)
    with pytest.raises(aiohttp.ClientError):
        await _get(server, ROOT, _client(authority, other, tmp_path))


async def test_a_certificate_of_the_authority_for_another_name_is_refused(
    server: MetricsServer, authority: Authority, proxies: Authority, tmp_path: Path
) -> None:
    await server.use(
        make_server_certificate(authority, HOST, NOW), FrontProxy(proxies.certificate.decode(), ("another name",))
    )
    status, content = await _get(server, ROOT, _client(authority, proxies, tmp_path))
    assert (status, content["reason"]) == (403, "Forbidden")
    assert repr(PROXY) in content["message"]


async def test_a_new_authority_is_used_at_once_and_the_bundle_holds_both(
    server: MetricsServer, authority: Authority, proxies: Authority, tmp_path: Path
) -> None:
    new = renewed(authority, _at(AUTHORITY_LIFE.days * 0.7))
    assert new != authority
    new = make_authority(NOW, previous=authority.certificate)
    assert (await _get(server, ROOT, _client(new, proxies, tmp_path)))[0] == 200  # another operator's old certificate
    await server.use(make_server_certificate(new, HOST, NOW), FrontProxy(proxies.certificate.decode()))
    assert (await _get(server, ROOT, _client(new, proxies, tmp_path)))[0] == 200
    with pytest.raises(aiohttp.ClientError):
        await _get(server, ROOT, _client(authority, proxies, tmp_path))


async def test_a_replaced_authority_of_front_proxies_is_admitted_and_the_old_one_is_not(
    server: MetricsServer, authority: Authority, proxies: Authority, tmp_path: Path
) -> None:
    later = make_authority(NOW)
    await server.use(make_server_certificate(authority, HOST, NOW), FrontProxy(later.certificate.decode()))
    assert server.port == 0  # clients of the old authority are disconnected
    await server.start(0, "127.0.0.1")
    assert (await _get(server, ROOT, _client(authority, later, tmp_path)))[0] == 200
    with pytest.raises(aiohttp.ClientError):
        await _get(server, ROOT, _client(authority, proxies, tmp_path))


async def test_the_authority_of_front_proxies_may_be_an_intermediate_one(
    server: MetricsServer, authority: Authority, tmp_path: Path
) -> None:
    """kube-apiserver accepts any certificate of its file as an authority, and so does Go's library."""
    intermediate = _intermediate_of(make_authority(NOW))
    await server.use(make_server_certificate(authority, HOST, NOW), FrontProxy(intermediate.certificate.decode()))
    await server.start(0, "127.0.0.1")
    assert (await _get(server, ROOT, _client(authority, intermediate, tmp_path)))[0] == 200


def test_an_authority_is_replaced_after_two_thirds_of_its_life(authority: Authority) -> None:
    days = AUTHORITY_LIFE.days
    assert renewed(authority, _at(days * 0.6)) == authority
    new = renewed(authority, _at(days * 0.7))
    assert new.bundle == new.certificate + authority.certificate
    assert not is_due(new.certificate, _at(days * 0.7))
    assert is_due(b"no certificate", NOW)


def test_a_secret_is_read_only_if_certificate_and_key_belong_together(authority: Authority, proxies: Authority) -> None:
    with_previous = make_authority(NOW, previous=authority.certificate)
    for made in (authority, with_previous):
        assert read_authority(authority_entries(made)) == made
    broken = [
        {},
        authority_entries(authority) | {"ca.key": proxies.key},
        authority_entries(authority) | {"ca.crt": b"x"},
        authority_entries(authority) | {"ca.key": b"x"},
        authority_entries(authority) | {"previous.crt": b"x"},
    ]
    assert [read_authority(entries) for entries in broken] == [None] * len(broken)
