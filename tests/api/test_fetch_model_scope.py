"""Models of ModelScope: its real client and a loopback server with its API. Skipped without the extra `modelscope`."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from octavo_engine.sources.resolve import fetch_model, resolve_model
from octavo_engine.wire.errors import StartupError
from octavo_testing.local_model_scope import LocalModelScope

pytestmark = pytest.mark.slow

pytest.importorskip("modelscope_hub", reason="ModelScope's client, the engine's extra `modelscope`, is not installed")

FILES = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
    "model.safetensors": bytes(range(256)) * 4000,
    "README.md": b"# m",
}
URI = "ms://org/model"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalModelScope]:
    server = LocalModelScope()
    server.files = dict(FILES)
    with server.running() as address:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", address)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HOME", "/proc/read-only")  # as in a pod
        yield server


@pytest.mark.parametrize("revision", [None, "v1"])
def test_needed_files_are_fetched_once(hub: LocalModelScope, tmp_path: Path, revision: str | None) -> None:
    path = fetch_model(URI, revision=revision)
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert sorted(hub.sent) == ["config.json", "model.safetensors"]
    assert resolve_model(URI, revision=revision).root == path
    assert path.is_relative_to(tmp_path / "cache")
    assert len(hub.sent) == 2
    assert fetch_model(URI, to=tmp_path / "m", revision=revision) == tmp_path / "m"


def test_fetched_model_is_served_without_the_hub(hub: LocalModelScope) -> None:
    path = fetch_model(URI)
    hub.statuses = {"": [503] * 500}
    assert resolve_model(URI).root == path


def test_new_version_replaces_the_old_one(hub: LocalModelScope) -> None:
    fetch_model(URI)
    hub.files["config.json"] = b'{"architectures": ["Qwen2ForCausalLM"]}'
    assert (fetch_model(URI) / "config.json").read_bytes() == hub.files["config.json"]


def test_broken_connection_is_retried(hub: LocalModelScope, tmp_path: Path) -> None:
    hub.cut_after = {"/repo": [500_000]}
    path = fetch_model(URI, to=tmp_path / "m")
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_missing_model_and_token_are_reported(hub: LocalModelScope, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="no such model or revision on ModelScope"):
        fetch_model("ms://org/nothing")
    with pytest.raises(StartupError, match="no such model or revision on ModelScope"):
        fetch_model(URI, revision="v9")
    hub.token = "ms-secret"
    with pytest.raises(StartupError, match="set MODELSCOPE_API_TOKEN"):
        fetch_model(URI)
    monkeypatch.setenv("MODELSCOPE_API_TOKEN", "ms-secret")
    assert fetch_model(URI).exists()
