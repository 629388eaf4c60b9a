"""Object stores: real clients of S3, Google Cloud Storage and Azure, with loopback servers that verify requests."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from octavo_engine.sources.download_dir import fetched_revision
from octavo_engine.sources.resolve import fetch_model, locate_adapter, resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.local_bucket import LocalBucket, ObjectServer
from octavo_testing.local_cloud_buckets import ACCOUNT_KEY, LocalContainer, LocalGCSBucket, service_account_key
from octavo_testing.serve_command import free_port

FILES = {"config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(), "model.safetensors": b"x" * 5000}
SERVERS: dict[str, type[ObjectServer]] = {"s3": LocalBucket, "gs": LocalGCSBucket, "az": LocalContainer}


@dataclass(frozen=True)
class Store:
    """A server with a model at `uri`; this process is its client."""

    server: ObjectServer
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
        yield Store(server, f"{request.param}://models/tiny")


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


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_keys_of_s3_come_from_a_profile(store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = store.server.environment("")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[work]\naws_access_key_id={keys['AWS_ACCESS_KEY_ID']}\naws_secret_access_key={keys['AWS_SECRET_ACCESS_KEY']}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert fetch_model(store.uri, to=tmp_path / "m") == tmp_path / "m"


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
