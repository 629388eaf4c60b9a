"""Access to the hub: tokens from the places that its own tools use, and errors without them. Copies of local models."""

import json
from pathlib import Path

import pytest
from octavo_engine.sources.resolve import fetch_model
from octavo_testing.fetch_command import fetch_environment, run_fetch
from octavo_testing.gguf_checkpoints import tiny_model, write_tiny_gguf
from octavo_testing.local_hub import LocalHub

pytestmark = pytest.mark.slow

FILES = {"config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(), "model.safetensors": b"x" * 5000}


@pytest.fixture
def hub(tmp_path: Path):
    server = LocalHub()
    server.files, server.token = FILES, "hf_secret"
    with server.running() as address:
        yield server, fetch_environment(tmp_path, HF_ENDPOINT=address)


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
