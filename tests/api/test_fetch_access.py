"""Credentials of a fetch: tokens and keys from the places that the hub and AWS use, and errors without them."""

import json
import sys
from pathlib import Path

import pytest
from octavo_engine.sources.fetch import fetch_model
from octavo_engine.sources.resolve import resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.fetch_command import fetch_environment, run_fetch
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.local_bucket import LocalBucket, environment
from octavo_testing.local_hub import LocalHub
from octavo_testing.serve_command import free_port

FILES = {"config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(), "model.safetensors": b"x" * 5000}
S3 = "s3://models/tiny"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def hub(tmp_path: Path):
    server = LocalHub()
    server.files, server.token = FILES, "hf_secret"
    with server.running() as address:
        yield server, fetch_environment(tmp_path, HF_ENDPOINT=address)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A bucket whose client is this process."""
    server = LocalBucket()
    server.files = {f"tiny/{name}": content for name, content in FILES.items()}
    with server.running() as address:
        for name, value in environment(address).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        yield server


def test_token_comes_from_the_environment_or_a_file(hub, tmp_path: Path) -> None:
    _, env = hub
    (tmp_path / "token").write_text("hf_secret\n")
    for given in ({"HF_TOKEN": "hf_secret"}, {"HF_TOKEN_PATH": str(tmp_path / "token")}):
        done = run_fetch("hf://org/model", "--to", str(tmp_path / str(len(given))), env=env | given)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (
            401,
            "RepoNotFound",
            "no such model on the hub: correct the name; if it is private, set HF_TOKEN (on K",
        ),
        (403, "GatedRepo", "access to this model must be granted: request it on its page, then set HF_TOKEN"),
        (403, "", "the hub denied access (403): set HF_TOKEN"),
    ],
)
def test_missing_token_is_reported_with_a_remedy(hub, status: int, code: str, message: str) -> None:
    server, env = hub
    server.refusal, server.error_code = status, code
    done = run_fetch("hf://org/model", env=env | {"HF_TOKEN": "hf_wrong"})
    assert done.returncode == 1
    assert message in done.stderr
    assert "hf_wrong" not in done.stderr
    assert "retrying" not in done.stderr


def test_keys_of_a_bucket_come_from_the_environment(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert resolve_model(S3).config == json.loads(FILES["config.json"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StartupError, match=r"access was denied \(SignatureDoesNotMatch\)\. Set AWS_ACCESS_KEY_ID and"):
        fetch_model(S3, to=tmp_path / "m")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    with pytest.raises(StartupError, match=r"access was denied \(AccessDenied\)"):
        fetch_model(S3, to=tmp_path / "m")
    bucket.is_public = True
    assert fetch_model(S3, to=tmp_path / "m") == tmp_path / "m"


def test_keys_of_a_bucket_come_from_a_profile(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = environment("")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        f"[work]\naws_access_key_id={keys['AWS_ACCESS_KEY_ID']}\naws_secret_access_key={keys['AWS_SECRET_ACCESS_KEY']}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert fetch_model(S3, to=tmp_path / "m") == tmp_path / "m"


def test_download_restarts_if_the_server_has_no_ranges(bucket: LocalBucket, tmp_path: Path) -> None:
    bucket.has_ranges = False
    content = bucket.files["tiny/model.safetensors"] = bytes(range(256)) * 12_000
    bucket.cut_after = {"model.safetensors": [2_000_000]}
    assert (fetch_model(S3, to=tmp_path / "m") / "model.safetensors").read_bytes() == content


def test_replaced_object_is_not_mixed_with_the_old_one(bucket: LocalBucket, tmp_path: Path) -> None:
    content = bucket.files["tiny/model.safetensors"] = bytes(3_000_000)
    bucket.cut_after = {"model.safetensors": [2_000_000]}
    answer = bucket.replace_on_cut = {"tiny/model.safetensors": content[:-1] + b"1"}
    with pytest.raises(StartupError, match="an object was replaced during the download"):
        fetch_model(S3, to=tmp_path / "m")
    path = fetch_model(S3, to=tmp_path / "m")
    assert (path / "model.safetensors").read_bytes() == answer["tiny/model.safetensors"]


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("http://127.0.0.1:PORT", "http://127.0.0.1:PORT cannot be reached: Connection refused (6 attempts)"),
        ("http://nobody.invalid", "http://nobody.invalid cannot be reached: "),
    ],
)
def test_unreachable_server_is_reported(
    bucket: LocalBucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str, why: str
) -> None:
    monkeypatch.setattr("octavo_engine.sources.retries.FIRST_PAUSE_S", 0.001)
    port = str(free_port())
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.replace("PORT", port))
    with pytest.raises(StartupError) as caught:
        fetch_model(S3, to=tmp_path / "m")
    assert str(caught.value).startswith(f"{S3}: {why.replace('PORT', port)}")
    assert "Generic" not in str(caught.value)


def test_missing_client_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StartupError, match=r"pip install 'octavo-engine\[s3\]'"):
        fetch_model(S3)
    with pytest.raises(StartupError, match="s3://BUCKET"):
        fetch_model("s3:///tiny")


def test_gguf_file_of_a_bucket_is_fetched(bucket: LocalBucket, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "a.gguf", "qwen2", tiny_model("qwen2"))
    bucket.files = {f"tiny/{name}.gguf": (tmp_path / "a.gguf").read_bytes() for name in ("q4", "q8")}
    path = fetch_model(f"{S3}/q8.gguf", to=tmp_path / "m")
    assert path == tmp_path / "m" / "q8.gguf"
    assert not (tmp_path / "m" / "q4.gguf").exists()
    files = resolve_model(f"{S3}/q4.gguf")
    assert files.gguf is not None
    assert files.gguf.name == "q4.gguf"
    with pytest.raises(StartupError, match=r"several GGUF files: choose one as s3://models/tiny/FILE: q4"):
        fetch_model(S3)


def test_local_model_is_copied(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    for name, content in (FILES | {"notes.md": b"n"}).items():
        (slow / name).write_bytes(content)
    assert fetch_model(f"file://{slow}") == slow
    copy = fetch_model(f"file://{slow}", to=tmp_path / "fast")
    assert {path.name for path in copy.iterdir() if not path.name.startswith(".")} == set(FILES)
    write_tiny_gguf(tmp_path / "a.gguf", "qwen2", tiny_model("qwen2"))
    copy = fetch_model(str(tmp_path / "a.gguf"), to=tmp_path / "fast-gguf")
    assert copy == tmp_path / "fast-gguf" / "a.gguf"
    assert copy.read_bytes() == (tmp_path / "a.gguf").read_bytes()
