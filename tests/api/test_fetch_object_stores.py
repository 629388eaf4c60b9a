"""Object stores: real clients of S3, Google Cloud Storage and Azure, with loopback servers that verify requests."""

import json
import os
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from octavo_engine.sources.download_dir import fetched_revision
from octavo_engine.sources.object_store_kinds import store_kind
from octavo_engine.sources.resolve import fetch_model, locate_adapter, resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_operator.metrics_api.certificates import make_authority, make_server_certificate
from octavo_testing.file_server import FileServer, Handler
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.local_bucket import KEY, KEY_ID, REGION, LocalBucket, ObjectServer
from octavo_testing.local_cloud_buckets import ACCOUNT_KEY, LocalContainer, LocalGCSBucket, service_account_key
from octavo_testing.serve_command import free_port

FILES = {"config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(), "model.safetensors": b"x" * 5000}
SERVERS: dict[str, type[ObjectServer]] = {"s3": LocalBucket, "gs": LocalGCSBucket, "az": LocalContainer}


@dataclass(frozen=True)
class Store:
    """A server with a model at `uri`; this process is its client."""

    server: ObjectServer
    address: str
    uri: str

    @property
    def scheme(self) -> str:
        return self.uri.partition("://")[0]


@pytest.fixture(params=SERVERS)
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    server = SERVERS[request.param]()
    server.files = {f"tiny/{name}": content for name, content in FILES.items()}
    with server.running() as address:
        for name, value in server.environment(address).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        yield Store(server, address, f"{request.param}://models/tiny")


def test_model_is_found_under_its_uri(store: Store, tmp_path: Path) -> None:
    assert resolve_model(store.uri).config == json.loads(FILES["config.json"])
    store.server.requests.clear()
    assert fetch_model(store.uri) == resolve_model(store.uri).root
    assert store.server.asked("model.safetensors") == []
    revision = fetched_revision(fetch_model(store.uri))
    assert len(revision) == 12
    store.server.files["tiny/config.json"] += b" "
    assert fetched_revision(fetch_model(store.uri)) not in ("", revision)
    assert fetch_model(store.uri, to=tmp_path / "m") == tmp_path / "m"


def test_adapters_are_found_under_their_uri(store: Store) -> None:
    store.server.files |= {f"tiny/{name}": b"{}" for name in ("adapter_config.json", "adapter_model.safetensors")}
    folder = locate_adapter(store.uri)
    assert {path.name for path in folder.iterdir() if path.is_file()} >= {"adapter_config.json"}
    assert not (folder / "model.safetensors").exists()
    del store.server.files["tiny/adapter_config.json"]
    with pytest.raises(StartupError, match=r"found no adapter_config\.json"):
        locate_adapter(store.uri)


#: Scheme -> variables with wrong credentials, the server's code for them, the variable of anonymous access, its code.
WRONG = {
    "s3": ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "SignatureDoesNotMatch", "AWS_SKIP_SIGNATURE", "AccessDenied"),
    "gs": (
        {"GOOGLE_SERVICE_ACCOUNT_KEY": "", "GOOGLE_BEARER_TOKEN": "e30.e30.d3Jvbmc"},
        "AccessDenied",
        "GOOGLE_SKIP_SIGNATURE",
        "AuthenticationRequired",
    ),
    "az": (
        {"AZURE_STORAGE_ACCOUNT_KEY": "d3Jvbmc="},
        "AuthenticationFailed",
        "AZURE_SKIP_SIGNATURE",
        "NoAuthenticationInformation",
    ),
}


def test_wrong_credentials_are_reported_and_public_buckets_need_none(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong, code, skip, anonymous_code = WRONG[store.scheme]
    for name, value in wrong.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(StartupError, match=rf"access was denied \({code}\)\. Set \w+.*, or {skip}=true for a public "):
        fetch_model(store.uri, to=tmp_path / "m")
    monkeypatch.setenv(skip, "true")
    with pytest.raises(StartupError, match=rf"access was denied \({anonymous_code}\)"):
        fetch_model(store.uri, to=tmp_path / "m")
    store.server.is_public = True
    assert fetch_model(store.uri, to=tmp_path / "m") == tmp_path / "m"


def test_missing_bucket_is_reported(store: Store) -> None:
    word = "container" if store.scheme == "az" else "bucket"
    with pytest.raises(StartupError, match=f"the {word} or object does not exist"):
        fetch_model(f"{store.scheme}://nobody/tiny")
    with pytest.raises(StartupError, match="no objects were found"):
        fetch_model(f"{store.scheme}://models/nothing")
    with pytest.raises(StartupError, match=f"{store.scheme}://{word.upper()}/FOLDER"):
        fetch_model(f"{store.scheme}:///tiny")


def test_download_restarts_if_the_server_has_no_ranges(store: Store, tmp_path: Path) -> None:
    store.server.has_ranges = False
    content = store.server.files["tiny/model.safetensors"] = bytes(range(256)) * 12_000
    store.server.cut_after = {"model.safetensors": [2_000_000]}
    assert (fetch_model(store.uri, to=tmp_path / "m") / "model.safetensors").read_bytes() == content


def test_broken_download_resumes(store: Store, tmp_path: Path) -> None:
    content = store.server.files["tiny/model.safetensors"] = bytes(range(256)) * 12_000
    store.server.cut_after = {"model.safetensors": [2_000_000]}
    assert (fetch_model(store.uri, to=tmp_path / "m") / "model.safetensors").read_bytes() == content
    first, second = store.server.asked("model.safetensors")
    assert "bytes=" not in first
    assert int(second.partition("bytes=")[2].partition("-")[0]) >= 1_000_000


def test_replaced_object_is_not_mixed_with_the_old_one(store: Store, tmp_path: Path) -> None:
    content = store.server.files["tiny/model.safetensors"] = bytes(3_000_000)
    store.server.cut_after = {"model.safetensors": [2_000_000]}
    answer = store.server.replace_on_cut = {"tiny/model.safetensors": content[:-1] + b"1"}
    with pytest.raises(StartupError, match="an object was replaced during the download"):
        fetch_model(store.uri, to=tmp_path / "m")
    path = fetch_model(store.uri, to=tmp_path / "m")
    assert (path / "model.safetensors").read_bytes() == answer["tiny/model.safetensors"]


ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL", "az": "AZURE_STORAGE_ENDPOINT"}


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("http://127.0.0.1:PORT", "http://127.0.0.1:PORT cannot be reached: Connection refused (6 attempts)"),
        ("http://nobody.invalid", "http://nobody.invalid cannot be reached: "),
    ],
)
def test_unreachable_server_is_reported(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str, why: str
) -> None:
    monkeypatch.setattr("octavo_engine.sources.retries.FIRST_PAUSE_S", 0.001)
    port = str(free_port())
    monkeypatch.setenv(ENDPOINTS[store.scheme], endpoint.replace("PORT", port))
    with pytest.raises(StartupError) as caught:
        fetch_model(store.uri, to=tmp_path / "m")
    assert str(caught.value).startswith(f"{store.uri}: {why.replace('PORT', port)}")
    assert "Generic" not in str(caught.value)


def test_gguf_file_of_a_bucket_is_fetched(store: Store, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf", "qwen2", tiny_model("qwen2"))
    store.server.files = {f"tiny/{name}.gguf": (tmp_path / "a.gguf").read_bytes() for name in ("q4", "q8")}
    path = fetch_model(f"{store.uri}/q8.gguf", to=tmp_path / "m")
    assert path == tmp_path / "m" / "q8.gguf"
    assert not (tmp_path / "m" / "q4.gguf").exists()
    files = resolve_model(f"{store.uri}/q4.gguf")
    assert files.gguf is not None
    assert files.gguf.name == "q4.gguf"
    with pytest.raises(StartupError, match=rf"several GGUF files: choose one as {store.uri}/FILE: q4"):
        fetch_model(store.uri)


def test_missing_client_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StartupError, match=r"pip install 'octavo-engine\[object-store\]'"):
        fetch_model("gs://models/tiny")


@pytest.fixture
def profiles(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the file of AWS profiles; the environment has neither credentials, nor endpoint, nor region."""
    for name in store.server.environment(""):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / ".aws").mkdir()
    return tmp_path / ".aws" / "config"


JSON_KEYS = json.dumps({"Version": 1, "AccessKeyId": KEY_ID, "SecretAccessKey": KEY})
PROFILES = {
    "keys": f"aws_access_key_id = {KEY_ID}\naws_secret_access_key = {KEY}\n",
    "process": f"credential_process = echo '{JSON_KEYS}'\n",
    "role": "role_arn = arn:aws:iam::123456789012:role/reader\nsource_profile = nobody\n",
    "failed": "credential_process = false\n",
    "missing": "credential_process = /missing/tool\n",
    "blank": "credential_process =\n",
    "list": "credential_process = echo []\n",
    "null": f"credential_process = echo '{json.dumps({'Version': 1, 'AccessKeyId': None, 'SecretAccessKey': None})}'\n",
    "token": "role_arn = arn:aws:iam::123456789012:role/reader\nweb_identity_token_file = /missing/token\n",
    "empty": "output = json\n",
}


def write_profiles(path: Path, endpoint: str) -> None:
    shared = f"region = {REGION}\nendpoint_url = {endpoint}\n"
    path.write_text("".join(f"[profile {name}]\n{lines}{shared}" for name, lines in PROFILES.items()))


@pytest.mark.parametrize("store", ["s3"], indirect=True)
@pytest.mark.parametrize("name", ["keys", "process"])
def test_s3_uses_credentials_region_and_endpoint_of_a_profile(
    store: Store, profiles: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    write_profiles(profiles, store.address)
    monkeypatch.setenv("AWS_PROFILE", name)
    assert fetch_model(store.uri, to=tmp_path / "m") == tmp_path / "m"


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_credentials_of_a_profile_are_renewed_before_they_expire(
    store: Store, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """boto3 renews credentials that expire within 10 minutes, so those that it gives are valid for 10 minutes."""
    write_profiles(profiles, store.address)
    monkeypatch.setenv("AWS_PROFILE", "process")
    kind = store_kind(store.uri)
    assert kind is not None
    provider = kind.options(os.environ)["credential_provider"]
    assert provider()["expires_at"] <= datetime.now(UTC) + timedelta(minutes=10)


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_region_and_endpoint_of_the_environment_replace_those_of_a_profile(
    store: Store, profiles: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_profiles(profiles, "http://nobody.invalid")
    profiles.write_text(profiles.read_text().replace(REGION, "eu-west-1"))
    for variable, value in {"AWS_PROFILE": "keys", "AWS_ENDPOINT_URL": store.address, "AWS_REGION": REGION}.items():
        monkeypatch.setenv(variable, value)
    assert fetch_model(store.uri, to=tmp_path / "m") == tmp_path / "m"


@pytest.mark.parametrize("store", ["s3"], indirect=True)
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nobody", "could not be found"),
        ("empty", "get_credentials"),
        ("role", '"nobody" referenced in the profile "role" does not exist'),
        ("failed", "custom-process"),
        ("missing", "/missing/tool"),
        ("blank", ""),
        ("list", ""),
        ("null", ""),
        ("token", "/missing/token"),
        ("unreadable", "Unable to parse config file"),
    ],
)
def test_profiles_without_credentials_are_reported(
    store: Store, profiles: Path, monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    write_profiles(profiles, store.address)
    if name == "unreadable":
        profiles.write_text("no section")
    monkeypatch.setenv("AWS_PROFILE", name)
    with pytest.raises(StartupError) as caught:
        fetch_model(store.uri)
    message = str(caught.value)
    assert message.startswith(f"AWS_PROFILE={name}: boto3 found no credentials: ")
    assert why in message
    assert f"aws configure export-credentials --profile {name} --format env" in message
    assert len(message.splitlines()) == 1
    assert store.server.requests == []


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_boto3_is_needed_only_for_a_profile(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("boto3", "botocore", "botocore.session", "botocore.exceptions", "obstore.auth.boto3"):
        monkeypatch.setitem(sys.modules, name, None)
    assert fetch_model(store.uri, to=tmp_path / "m") == tmp_path / "m"
    monkeypatch.setenv("AWS_PROFILE", "keys")
    assert fetch_model(store.uri, to=tmp_path / "m2") == tmp_path / "m2"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StartupError, match=r"^AWS_PROFILE=keys: .* pip install boto3, or ") as caught:
        fetch_model(store.uri, to=tmp_path / "m3")
    assert len(str(caught.value).splitlines()) == 1


class _Roles(Handler):
    """Responds as a container's credential endpoint (GET) and as AWS' token service (POST) do."""

    def answer(self) -> None:
        keys = {"AccessKeyId": KEY_ID, "SecretAccessKey": KEY, "Expiration": "2099-01-01T00:00:00Z"}
        if self.command == "GET":
            self.send_whole(200, json.dumps(keys | {"Token": "session"}).encode())
            return
        body = "".join(f"<{name}>{value}</{name}>" for name, value in (keys | {"SessionToken": "session"}).items())
        for name in ("Credentials", "AssumeRoleWithWebIdentityResult", "AssumeRoleWithWebIdentityResponse"):
            body = f"<{name}>{body}</{name}>"
        self.send_whole(200, body.encode(), Content_Type="text/xml")


class RoleServer(FileServer):
    handler_class = _Roles


@pytest.mark.parametrize("store", ["s3"], indirect=True)
@pytest.mark.parametrize("kind", ["web identity", "container"])
@pytest.mark.parametrize("profile", ["", "keys"])
def test_roles_of_s3_need_no_profile(
    store: Store, profiles: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, profile: str
) -> None:
    profiles.write_text("no section")
    token = tmp_path / "token"
    token.write_text("signed by the cluster")
    variables = {"AWS_ENDPOINT_URL": store.address, "AWS_REGION": REGION, "AWS_PROFILE": profile}
    roles = RoleServer()
    if kind == "web identity":
        roles.tls, variables["AWS_CA_BUNDLE"] = tls_of_localhost(tmp_path)
    with roles.running() as address:
        if kind == "web identity":
            variables |= {"AWS_WEB_IDENTITY_TOKEN_FILE": str(token), "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/m"}
            variables["AWS_ENDPOINT_URL_STS"] = address.replace("http://127.0.0.1", "https://localhost")
        else:
            variables["AWS_CONTAINER_CREDENTIALS_FULL_URI"] = f"{address}/role"
            variables["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = str(token)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert fetch_model(store.uri, to=tmp_path / "m") == tmp_path / "m"
    assert roles.requests


def tls_of_localhost(folder: Path) -> tuple[ssl.SSLContext, str]:
    """Return the context of a server on localhost, and the file of the authority that a client must trust."""
    authority, now = make_authority(datetime.now(UTC)), datetime.now(UTC)
    (folder / "server.pem").write_bytes(make_server_certificate(authority, "localhost", now))
    (folder / "ca.pem").write_bytes(authority.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context, str(folder / "ca.pem")


@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_key_of_a_service_account_may_be_a_file(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = json.loads(service_account_key()) | {"type": "service_account"}
    (tmp_path / "key.json").write_text(json.dumps(key))
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    assert fetch_model(store.uri, to=tmp_path / "m") == tmp_path / "m"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(StartupError, match=r"tiny: the credentials .*none\.json.*GOOGLE_SERVICE") as caught:
        fetch_model(store.uri, to=tmp_path / "m2")
    assert len(str(caught.value).splitlines()) == 1
    assert "Generic" not in str(caught.value)


@pytest.mark.parametrize("store", ["az"], indirect=True)
def test_azure_reads_the_variables_of_its_command_line(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_KEY", ACCOUNT_KEY)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "octavotests")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    assert fetch_model("azure://models/tiny", to=tmp_path / "m") == tmp_path / "m"
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    with pytest.raises(StartupError, match="AZURE_STORAGE_ACCOUNT_NAME is not set"):
        fetch_model(store.uri)
