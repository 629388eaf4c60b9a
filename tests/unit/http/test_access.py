"""The access policy of both servers by caller and kind of route. docs/reference/access.md lists every route."""

import pytest
from octavo_engine.wire.errors import InvalidRequest
from octavo_server.http.access import MAX_TENANT_CHARS, AccessPolicy, Identity, access_policy, kind_of
from octavo_server.http.api_keys import ApiKeys
from octavo_server.http.cors import CorsPolicy
from octavo_server.http.tenants_file import TenantLimits
from octavo_server.openai.errors import Forbidden, Unauthorized
from octavo_server.router.settings import RouterSettings
from starlette.exceptions import HTTPException

ADMIN_PORT = 9000
SENT_LIMITS = [(b"x-octavo-weight", b"2.5"), (b"x-octavo-max-tokens", b"7")]
LIMITS = TenantLimits.of_headers(b"2.5", b"7")


@pytest.fixture
def keys(tmp_path):
    (tmp_path / "keys").write_text("admin: boss\nalice: sk-a\n")
    return ApiKeys(paths=[tmp_path / "keys"])


def bearer(key):
    return [(b"authorization", b"Bearer " + key)]


def secret(value, tenant=b"bob"):
    return [(b"x-octavo-secret", value), (b"x-octavo-tenant", tenant)]


def identify(policy, path, headers=(), *, method="GET", port=8000):
    try:
        return policy.identify(method, path, list(headers), port)
    except (Unauthorized, Forbidden, HTTPException) as error:
        return {Unauthorized: 401, Forbidden: 403, HTTPException: 404}[type(error)]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/models/org/name", "client"),
        ("/v1/responses/id/cancel", "client"),
        ("/v1/modelsx", None),
        ("/drain/", "admin"),
        ("", None),
        ("/kv/events", "router"),
    ],
)
def test_the_table_matches_parameters_and_no_other_paths(path, kind):
    assert kind_of(path) == kind


@pytest.mark.parametrize(
    ("headers", "client", "admin", "unknown"),
    [
        ([], 401, 401, 401),
        (bearer(b"sk-a"), Identity("alice"), 403, 404),
        (bearer(b"boss"), Identity("admin", is_admin=True), Identity("admin", is_admin=True), Identity("admin", True)),
        ([(b"authorization", b"bearer  sk-a ")], Identity("alice"), 403, 404),
        ([(b"authorization", b"Basic sk-a")], 401, 401, 401),
        ([(b"authorization", b"Bearer ")], 401, 401, 401),
        ([*bearer(b"wrong"), *bearer(b"sk-a")], 401, 401, 401),
        (secret(b"s2"), *[Identity("bob", is_router=True)] * 3),
        ([*secret(b"s2"), *SENT_LIMITS], *[Identity("bob", is_router=True, limits=LIMITS)] * 3),
        ([*bearer(b"sk-a"), *SENT_LIMITS], Identity("alice"), 403, 404),
        (secret(b""), 401, 401, 401),
        ([*secret(b"wrong"), *bearer(b"boss")], 401, 401, 401),
    ],
)
def test_each_caller_of_a_server_with_keys_and_a_secret_gets_its_routes(keys, headers, client, admin, unknown):
    policy = AccessPolicy(keys=keys, secrets=ApiKeys(["s1", "s2"]))
    assert identify(policy, "/v1/models", headers) == client
    for path in ("/drain", "/kv/events"):
        assert identify(policy, path, headers) == admin
    assert identify(policy, "/nowhere", headers) == unknown
    assert identify(policy, "/health", headers) == Identity()


@pytest.mark.parametrize(
    ("headers", "identity"),
    [
        ([(b"x-api-key", b"sk-a")], Identity("alice")),
        ([(b"x-api-key", b"")], 401),
        ([(b"x-api-key", b"wrong")], 401),
        ([*bearer(b"wrong"), (b"x-api-key", b"sk-a")], 401),
        ([(b"x-api-key", b"sk-a"), *bearer(b"boss")], Identity("admin", is_admin=True)),
    ],
)
def test_routes_of_messages_accept_x_api_key_and_others_do_not(keys, headers, identity):
    policy = AccessPolicy(keys=keys)
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/render"):
        assert identify(policy, path, headers) == identity
    if not isinstance(identity, Identity) or not identity.is_admin:
        assert identify(policy, "/v1/chat/completions", headers) == 401


def test_a_single_key_is_not_the_admin_key():
    policy = AccessPolicy(keys=ApiKeys(["only"]))
    assert isinstance(identify(policy, "/v1/models", bearer(b"only")), Identity)
    assert identify(policy, "/drain", bearer(b"only")) == 403


def test_a_server_without_keys_and_secret_is_open():
    for path in ("/v1/models", "/drain", "/kv/events", "/nowhere"):
        assert identify(AccessPolicy(), path, secret(b"x")) == Identity()


def test_a_secret_alone_closes_all_but_client_routes():
    policy = AccessPolicy(secrets=ApiKeys(["s"]))
    assert identify(policy, "/v1/models") == Identity()
    assert [identify(policy, path) for path in ("/drain", "/kv/events", "/nowhere")] == [401, 401, 404]


def test_a_foreign_page_may_not_administer_an_open_server():
    policy = AccessPolicy(cors=CorsPolicy())
    foreign = [(b"host", b"localhost:8000"), (b"origin", b"https://evil.test")]
    same = [(b"host", b"localhost:8000"), (b"origin", b"http://localhost:8000")]
    assert identify(policy, "/drain", foreign, method="POST") == 403
    assert identify(policy, "/drain", same, method="POST") == Identity()
    assert identify(policy, "/drain", foreign) == Identity()


@pytest.mark.parametrize(
    ("path", "main", "admin"),
    [
        ("/health", 200, 200),
        ("/metrics", 404, 200),
        ("/drain", 404, 200),
        ("/v1/models", 200, 404),
        ("/load", 200, 404),
    ],
)
def test_an_admin_port_splits_the_routes(path, main, admin):
    policy = AccessPolicy(admin_port=ADMIN_PORT)
    found = [identify(policy, path, port=port) for port in (8000, ADMIN_PORT)]
    assert [code if isinstance(code, int) else 200 for code in found] == [main, admin]


def test_internal_headers_are_for_routers_and_administrators(keys):
    policy = AccessPolicy(keys=keys)
    identities = (Identity("alice"), Identity("admin", is_admin=True), Identity(is_router=True))
    assert [policy.shows_internals(identity) for identity in identities] == [False, True, True]
    assert AccessPolicy().shows_internals(Identity())


LEFT = ", ".join(f"x-ratelimit-{n}-{what}" for what in ("requests", "tokens") for n in ("limit", "remaining", "reset"))
EXPOSED = {b"access-control-expose-headers": f"x-request-id, retry-after, {LEFT}".encode()}


@pytest.mark.parametrize(
    ("allowed", "origin", "expected"),
    [
        ((), b"https://a", {}),
        (("*",), b"https://a", {b"access-control-allow-origin": b"*"} | EXPOSED),
        (("https://a",), b"https://a", {b"access-control-allow-origin": b"https://a", b"vary": b"origin"} | EXPOSED),
        (("https://a",), b"https://b", {b"vary": b"origin"}),
        (("*",), None, {}),
    ],
)
def test_cors_headers_follow_the_allowed_origins(allowed, origin, expected):
    headers = [] if origin is None else [(b"origin", origin)]
    assert dict(CorsPolicy(allowed_origins=allowed).response_headers(headers)) == expected


@pytest.mark.parametrize("admin_port", [None, 9000])
def test_a_router_takes_the_secret_of_its_replicas_on_administrators_routes_only(keys, admin_port):
    policy = AccessPolicy(keys=keys, secrets=ApiKeys(["s1"]), is_router=True, admin_port=admin_port)
    for headers in (secret(b"s1"), secret(b"wrong")):
        with pytest.raises(Unauthorized):
            policy.identify("POST", "/v1/completions", headers, 8000)
    assert policy.identify("POST", "/v1/completions", [*secret(b"s1"), *bearer(b"boss")], 8000).is_router is False
    assert policy.identify("GET", "/state/events", secret(b"s1"), admin_port or 8000).is_router


def test_a_router_with_an_admin_secret_takes_no_secret_of_its_replicas():
    """Every engine pod has the router secret: it must not open the routes by which the operator follows the router."""
    settings = RouterSettings(router_secret=("shared",), admin_secret=("new", "old"))
    policy = access_policy(settings, is_router=True, admin_secrets=settings.admin_secret)
    assert identify(policy, "/state/events", secret(b"shared")) == 401
    assert identify(policy, "/drain", secret(b"shared"), method="POST") == 401
    for admin_secret in (b"new", b"old"):
        assert identify(policy, "/state/events", secret(admin_secret)).is_router


def test_a_router_names_a_tenant_of_bounded_length():
    policy = AccessPolicy(secrets=ApiKeys(["s"]))
    longest = b"t" * MAX_TENANT_CHARS
    assert policy.identify("POST", "/v1/completions", secret(b"s", longest), 8000).tenant == longest.decode()
    with pytest.raises(InvalidRequest, match="257 characters; the limit is 256"):
        policy.identify("POST", "/v1/completions", secret(b"s", longest + b"t"), 8000)
